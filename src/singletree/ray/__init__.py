"""singletree on a Ray cluster: ``serve run singletree.ray:app config=/path/to/singletree.toml``.

Ray is imported in this package alone. ``docs/deploy.md`` describes how it is used.
"""

from singletree.ray.application import build_application as app

__all__ = ["app"]
