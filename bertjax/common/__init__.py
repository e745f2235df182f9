"""Code that every room uses: the registry, `UserError`, files, locks, worker processes, progress bars, sorting,
checksums.
"""
