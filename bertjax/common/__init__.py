"""Code for all rooms: the registry, `UserError`, files, locks, worker processes, progress bars, sorting, checksums."""
