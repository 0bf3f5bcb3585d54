"""Federations over Flower: clients on their own devices, or simulated on Ray.

The messages and their checks (``fedcover.deploy.wire``) are independent of Flower. This package needs
``pip install 'fedcover[flower]'``.
"""

from fedcover.errors import check_extra

check_extra("flower", "training over Flower", "flwr")
