"""What the server sends to nodes of the entries outside their masks.

A device that keeps a copy of the model renews it with what it trained, and the server with what it accepted. The two
differ if a reply was lost, rejected or clipped, or if a device lost its copy. A request therefore names a copy by its
digest only if the last request to that node, in this process, has a valid reply, and the copy that the node has since
then is the server's. Else the values are sent. A node without the named copy reports an error, and gets the values in
its next request.
"""

from torch import Tensor

from fedcover.aggregation.base import ClientUpdate
from fedcover.deploy.node.copies import renewed
from fedcover.deploy.wire import ExactValues, KeptCopy, QuantizedValues, SentComplement
from fedcover.federation.checkpoint import State, digest_of
from fedcover.federation.complements import copy_of
from fedcover.federation.federation import Federation
from fedcover.params import Params
from fedcover.training.complements import Kept, Quantized
from fedcover.training.quantization import Codes, quantize


class RequestComplements:
    """The complements of a run's requests; each is built when its request is.

    Args:
        federation: The federation.
    """

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._copies: dict[int, str] = {}
        self._shared: tuple[Params, SentComplement] | None = None

    @property
    def keeps_copies(self) -> bool:
        """Whether devices keep their copies of the model."""
        return type(self._federation.complement) is Kept

    def of(self, client: int, node: int, state: State) -> SentComplement | None:
        """Return what a request to a client's node carries; None if clients see zeros."""
        complement = self._federation.complement
        if not complement.sees:
            return None
        if self.keeps_copies:
            return self._copy(client, node, state)
        if complement.keeps_copies:  # one of the user's own, which devices do not know
            return ExactValues(complement.values(state.theta, copy_of(self._federation, state, client)))
        if self._shared is None or self._shared[0] is not state.theta:
            self._shared = (state.theta, self._for_all(state.theta))
        return self._shared[1]

    def _for_all(self, theta: Params) -> SentComplement:
        """Return what every request of a round carries."""
        complement = self._federation.complement
        if type(complement) is Quantized:
            codes: dict[str, Codes] = {n: quantize(t, complement.bits) for n, t in self._trained(theta).items()}
            return QuantizedValues(complement.bits, codes)
        return ExactValues(complement.values(theta, {}))

    def _copy(self, client: int, node: int, state: State) -> SentComplement:
        """Return the digest of a client's copy if its node has that copy, else its values."""
        copy = copy_of(self._federation, state, client)
        digest = self._copies.pop(node, None)  # until there is a reply, it is not known what the node has
        if digest is not None and digest == digest_of(self._trained(copy)):
            return KeptCopy(digest)
        return ExactValues(copy)

    def add_reply(self, update: ClientUpdate, node: int, state: State) -> None:
        """Note which copy a node has, since it has sent a valid reply.

        Args:
            update: The update in its reply.
            node: The node.
            state: The state from which its request was made.
        """
        if self.keeps_copies:
            before = self._trained(copy_of(self._federation, state, update.client))
            self._copies[node] = digest_of(renewed(before, update))

    def _trained(self, tensors: Params) -> dict[str, Tensor]:
        """Return the tensors that clients train."""
        return {name: t for name, t in tensors.items() if name not in self._federation.structure.frozen}
