"""What objectives are made of. Every module beside this folder is an objective."""
