"""Strategy configurations that travel with the package; importing it registers their schemas with Hydra.

A user's own Hydra program needs ``import lightning_distlab`` and, in its primary configuration,
``hydra.searchpath: [pkg://lightning_distlab.conf]``; then ``strategy=dgc_ring`` works there too.
"""

from lightning_distlab.conf.schema import register_schemas

register_schemas()
