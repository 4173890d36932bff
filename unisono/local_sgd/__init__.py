"""Local SGD and DiLoCo: sites that train alone and synchronize from time to time."""
