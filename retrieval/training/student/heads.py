"""What stands behind the native encoder in a model of the libraries: pooling and projections, over packed tokens.

No pad token reaches them; a ColBERT's vectors are padded behind the last projection, where the losses compare them.

Importing this module imports sentence-transformers and PyLate (extra ``train``).

Shapes: B texts, S the longest of them in tokens, N packed tokens, D model width, d width of a vector.
Source: the contracts of sentence-transformers 5.3's ``Pooling`` and of PyLate 1.6's ``Dense``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pylate.models import Dense
from sentence_transformers.models import Pooling
from torch import nn

from quiver.encoder.checkpoints.folder import read_weights
from quiver.encoder.files import read_json, replacing, save_tensors, write_json
from quiver.retrieval.models.encoding import Projection, pool
from quiver.retrieval.training.student.native import PACKED, packed_of, pad_to


class NativePooling(Pooling):  # type: ignore[misc]  # the library is untyped
    """One vector a text, by the rule that `BiEncoder` has.

    The library's own would blank the prompt out of the attention mask in place; a cached loss, which encodes a batch twice,
    would then encode it without its prompt.
    """

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        """Packed (N, D) to ``sentence_embedding``, (B, D) float32."""
        hidden, batch = packed_of(features)
        prompt = 0 if self.include_prompt else features.get("prompt_length", 0)
        skip = prompt if isinstance(prompt, int) else int(prompt[0])  # a tensor from the library's own collator, never from ours
        others = {key: value for key, value in features.items() if key not in PACKED}
        return {**others, "sentence_embedding": pool(hidden, batch, self.get_pooling_mode_str(), skip=skip)}


class NativeProjection(Dense):  # type: ignore[misc]  # the library is untyped
    """A `Projection` of a checkpoint: of a bi-encoder's vectors, or of a ColBERT's packed tokens.

    A subclass of PyLate's own in name: PyLate replaces a module behind the first one that is not.

    Args:
        projection: It is trained in place.
        pads: It is the last one of a ColBERT: what comes out is padded.
    """

    def __init__(self, projection: Projection, *, pads: bool = False) -> None:
        nn.Module.__init__(self)  # past the library's, which would draw weights of its own
        self.projection = projection
        self.pads = pads
        self.in_features = projection.linear.in_features
        self.out_features = projection.linear.out_features

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        """``sentence_embedding`` (B, D) to (B, d); or packed tokens (N, D) to (N, d), padded ``token_embeddings`` (B, S, d) if last."""
        if "sentence_embedding" in features:
            return {**features, "sentence_embedding": self.projection(features["sentence_embedding"])}
        hidden, batch = packed_of(features)
        projected = self.projection(hidden)
        if not self.pads:
            return {**features, "packed_embeddings": projected}
        others = {key: value for key, value in features.items() if key not in PACKED}
        return {**others, "token_embeddings": pad_to(projected, batch, features["input_ids"].shape[1])}

    def get_config_dict(self) -> dict[str, Any]:
        """The keys of a Dense module's config.json, and whether the output is padded."""
        linear = self.projection.linear
        return {
            "in_features": linear.in_features,
            "out_features": linear.out_features,
            "bias": linear.bias is not None,
            "activation_function": self.projection.activation,
            "use_residual": self.projection.use_residual,
            "pads": self.pads,
        }

    def save(self, output_path: str, *args: object, safe_serialization: bool = True) -> None:
        """Write config.json and model.safetensors, the tensors under the names that PyLate gives them."""
        del args, safe_serialization  # always safetensors
        write_json(Path(output_path) / "config.json", self.get_config_dict())
        with replacing(Path(output_path) / "model.safetensors") as temporary:
            save_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in self.projection.state_dict().items()}, temporary)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **hub: object) -> NativeProjection:
        """Read what `save` wrote; ``hub`` are sentence-transformers' download options, of no use for a folder."""
        del hub
        folder = Path(model_name_or_path) / subfolder
        config = read_json(folder / "config.json")
        projection = Projection(
            config["in_features"],
            config["out_features"],
            bias=config["bias"],
            activation=config["activation_function"],
            residual=config["use_residual"],
        )
        projection.load_state_dict(read_weights(folder))
        return cls(projection, pads=config["pads"])
