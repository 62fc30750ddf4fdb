"""Being here, it puts this folder's helper modules within reach of the folders below."""
