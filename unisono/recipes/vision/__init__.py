"""Parts of the recipes for pictures: models, files, random changes, annotations and drawn data."""
