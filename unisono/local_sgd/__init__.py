"""Local SGD and DiLoCo: sites that train alone and synchronize every some steps."""
