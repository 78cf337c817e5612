"""The two networks that are trained together."""

from data import IGNORED, SIZE, PictureSet
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from magcache.demo.text_encoder import EmojiTextEncoder

PATCH = 4
HEAD = 32


class DemoModel(nn.Module):
    """Predicts the velocity of noisy pictures from their token ids."""

    def __init__(self, data: PictureSet, layers: int, width: int) -> None:
        super().__init__()
        self.text_encoder = EmojiTextEncoder(
            vocabulary=data.vocabulary, ignored=IGNORED, prompts=data.prompts, width=width
        )
        self.transformer = SD3Transformer2DModel(
            sample_size=SIZE,
            patch_size=PATCH,
            in_channels=3,
            out_channels=3,
            num_layers=layers,
            attention_head_dim=HEAD,
            num_attention_heads=width // HEAD,
            joint_attention_dim=width,
            caption_projection_dim=width,
            pooled_projection_dim=width,
            pos_embed_max_size=SIZE // PATCH,
            qk_norm="rms_norm",
        )
        # Every block starts as the identity and the output as zero, as in DiT.
        zeros = [self.transformer.proj_out]
        for block in self.transformer.transformer_blocks:
            zeros += [block.norm1.linear, block.norm1_context.linear]
        for linear in zeros:
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, noisy: Tensor, timestep: Tensor, input_ids: Tensor) -> Tensor:
        tokens, pooled = self.text_encoder(input_ids)
        velocity: Tensor = self.transformer(
            hidden_states=noisy,
            timestep=timestep,
            encoder_hidden_states=tokens,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        return velocity
