"""What cannot be trained for several clients at once, with the reason."""

import re
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedcover.data import Examples
from fedcover.data.inputs import copy_of, count, take
from fedcover.engines.client_trainer import ClientTrainer
from fedcover.engines.vectorized.counted_norms import RealExamples, count_examples
from fedcover.errors import InputError
from fedcover.params import on_device
from fedcover.seeding import seeded
from fedcover.structure.batch_norm import has_statistics
from fedcover.structure.calls import call_model, first_line
from fedcover.structure.dropout import draws, silent_dropout
from fedcover.training.client import Job
from fedcover.training.memory import is_out_of_memory
from fedcover.training.recipes import Recipe, moment_dtype

LOOKED_AT = 64
"""The number of examples, and of labels, with which a loss is tried."""

REASONS = {
    r"\.item\(\)": "reads the values of tensors, as `if x.sum() > 0` or `.item()` do",
    r"dynamic shape|aten::(nonzero|_?unique|masked_select)": "has a tensor whose shape depends on the values of others",
    r"^vmap: inplace": "writes into a tensor from `torch.zeros` or the like; one from `x.new_zeros` can be written to",
    r"autograd\.Function|does not have vmap support": (
        "has a torch.autograd.Function without a rule for batches; setup_context and generate_vmap_rule = True give one"
    ),
    r"saved tensor hooks": "saves memory by checkpoints, which cannot be batched",
    r"requires_grad_\(\)": "computes gradients by torch.autograd; torch.func.grad can be batched",
}
"""Plain words for what torch says, by patterns of its messages."""


def checked_device(name: str) -> torch.device:
    """Return a device; raise InputError if torch does not have it, or it is neither a CPU nor a GPU of NVIDIA."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device must be the name of a device, such as cuda, cuda:1 or cpu; got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"engine=vectorized runs on cuda and cpu; got device={name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"torch finds no GPU for device={name!r}; use device='cpu', or engine=processes")
    return device


def only_together(job: Job, error: Exception) -> InputError | None:
    """Return the reason if the training of a batch failed for a client that can be trained alone; None if it cannot.

    Errors of the device and of memory are not the model's.

    Args:
        job: The first job of the batch.
        error: The error of the batch.
    """
    if isinstance(error, torch.AcceleratorError) or is_out_of_memory(error):
        return None
    reason = next((words for pattern, words in REASONS.items() if re.search(pattern, str(error))), None)
    if reason is None and not _trains_alone(job):
        return None
    torch_words = first_line(error).split(". ")[0].removeprefix("vmap: ")
    return InputError(
        f"engine=vectorized cannot train the model {type(job.task.model).__name__} for several clients at once: its"
        f" forward pass or loss {reason or f'has an operation that torch cannot batch ({torch_words})'}; use"
        f" engine=processes"
    )


def _trains_alone(job: Job) -> bool:
    """Return whether a client can be trained by the definition."""
    cpu = torch.device("cpu")
    try:
        ClientTrainer(shrink=False, traced=False).train(
            replace(job, theta=on_device(job.theta, cpu), mask=on_device(job.mask, cpu), options=None)
        )
    except Exception:
        return False
    return True


def refuse_randomness(model: nn.Module, job: Job) -> None:
    """Raise InputError if a model draws random numbers itself: they would depend on the other clients of a batch."""
    if draws(model, job.population.examples.example()):
        name = type(job.task.model).__name__
        raise InputError(
            f"the model {name} draws random numbers other than by dropout, which engine=vectorized cannot separate by"
            f" client; use nn.Dropout or F.dropout, or engine=processes"
        )


def refuse_joint_losses(model: nn.Module, job: Job) -> None:
    """Raise InputError unless the loss of a batch is the mean over its examples: padding could not be left out."""
    examples, loss = job.population.examples, job.loss
    with seeded(0, "look"), torch.no_grad():
        inputs, labels = examples.read(_one_of_each_label(examples))
        scores = call_model(model, copy_of(inputs))
        together = loss(scores, labels)
        alone = torch.stack([loss(scores[i : i + 1], labels[i : i + 1]) for i in range(len(labels))]).mean(0)
    rounding = max(1e-3, 4 * torch.finfo(together.dtype).eps)
    if together.shape != alone.shape or not torch.allclose(together, alone, rtol=rounding, atol=1e-5):
        size, name = job.recipe.batch_size, getattr(loss, "__name__", type(loss).__name__)
        raise InputError(
            f"the loss {name} of a batch is not the mean of its examples' losses, so engine=vectorized cannot leave out"
            f" the padding of short batches; give every client a multiple of {size} examples, or use engine=processes"
        )


def leave_out_padding(model: nn.Module, job: Job) -> RealExamples | None:
    """Have the batch norms of a scratch model, which is changed in place, leave out the padding of short batches.

    Returns:
        What must be set before each forward pass; None for a model without batch norms.

    Raises:
        InputError: If the scores of an example depend on others of its batch in another way.
    """
    examples = job.population.examples
    with seeded(0, "look"), torch.no_grad(), silent_dropout():
        inputs, _ = examples.read(_one_of_each_label(examples))
        statistics = has_statistics(model)
        rows = max(count(inputs) // 2, 2 if statistics else 1)  # one example may have no statistics
        apart = call_model(model, copy_of(take(inputs, slice(rows)))) if rows < count(inputs) else None
        batch = count_examples(model) if statistics else None
        if apart is None:
            return batch
        if batch is not None:
            batch.set(torch.arange(count(inputs)) < rows)
        together = call_model(model, copy_of(inputs))
        if batch is not None:
            batch.set(None)
    close = max(1e-3, 4 * torch.finfo(together.dtype).eps)
    atol = close * max(1e-6, float(apart.abs().max()))
    if not torch.allclose(together[:rows], apart, rtol=0, atol=atol, equal_nan=True):
        size, name = job.recipe.batch_size, type(job.task.model).__name__
        raise InputError(
            f"the scores that the model {name} gives an example depend on the others of its batch, so"
            f" engine=vectorized cannot leave out the padding of short batches; give every client a multiple of {size}"
            f" examples, or use engine=processes (attention between examples often means that batch_first=True is"
            f" missing)"
        )
    return batch


def refuse_recipes_of_one_step_size(recipe: Recipe) -> None:
    """Raise InputError if the direction of a recipe depends on its numbers, which clients of a batch do not share."""
    moments = {name: torch.full((8,), 2, dtype=moment_dtype(name, torch.float32)) for name in recipe.moment_names}
    grad, theta = torch.rand(2, 8, generator=torch.Generator().manual_seed(0))
    template = recipe.template
    recipes = template, replace(template, lr=0.37, epochs=3, local_steps=5)
    try:
        one, two = (each.direction(grad.clone(), theta.clone(), dict(moments))[0] for each in recipes)
    except Exception:  # such as a direction of matrices only
        return
    if not torch.equal(one, two):
        raise InputError(
            f"engine=vectorized shares steps between step sizes, and the direction of {type(recipe).__name__} depends"
            f" on lr, epochs or local_steps; give the recipe a field of its own for that, or use engine=processes"
        )


def _one_of_each_label(examples: Examples) -> Tensor:
    """Return the indices of some examples, among them one with each label, if they can be counted."""
    first, labels = torch.arange(min(len(examples), LOOKED_AT)), examples.labels
    if labels is None or labels.is_floating_point():
        return first
    rows = labels.flatten(1) if labels.ndim > 1 else labels.unsqueeze(1)
    values = rows.unique()[:LOOKED_AT]
    return torch.cat([first, torch.stack([(rows == value).any(1).to(torch.int8).argmax() for value in values])])
