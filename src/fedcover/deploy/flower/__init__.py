"""Federations over Flower: clients on devices of their own, or simulated on Ray.

What travels (``wire``) and how answers are checked knows nothing of Flower. The rest needs ``pip install
'fedcover[flower]'``.
"""

from fedcover.errors import check_extra

check_extra("flower", "training over Flower", "flwr")
