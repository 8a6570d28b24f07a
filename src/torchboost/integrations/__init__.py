"""Boost inside other people's trainers. Each module needs the package that it is named after."""
