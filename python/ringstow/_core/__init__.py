"""Code for all other packages: settings, errors, arguments, files, waits. No checkpoints here."""
