"""Code that every room uses: registry, files, locks, workers, progress bars, sorting, checksums."""
