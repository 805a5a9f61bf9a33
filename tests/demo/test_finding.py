"""What the cross-attention of `emoji-xl` begins with."""

from __future__ import annotations

import torch
from small_models import encoded, glyphs, tiny_xl

from tomadiff.demo.train import meaning
from tomadiff.demo.train.finding import tell_parts
from tomadiff.demo.train.watch import HEAD, Watch, part_of


def test_keys_begin_with_rows_and_columns_and_values_with_what_the_part_looks_like():
    model = tiny_xl()
    pool = encoded()
    shown = meaning.details(pool)
    meaning.spell(model.table, shown, glyphs())
    tell_parts(model, pool, shown)
    latents, tokens = pool.draw(8, torch.Generator().manual_seed(1), empty=0.0)
    attention = [module for name, module in model.unet.named_modules() if name.endswith("attn2")]
    assert len(attention) == 10
    look = ((meaning.parts(latents) - shown.mean) @ shown.basis)[..., :HEAD]
    # A place that knows its row and its column, and nothing else, finds its part.
    queries = torch.zeros(16 * 16, HEAD)
    part = part_of(16)
    queries[torch.arange(256), part // 8] = queries[torch.arange(256), 8 + part % 8] = 12.0
    with torch.no_grad():
        states = model.text_states(tokens)[0]
        for module in attention:
            seen = Watch()
            seen.queries.append(queries.expand(8, -1, -1))
            seen.keys.append(module.to_k(states))
            assert seen.places(model.tellers) < 0.1
            values = module.to_v(states)[:, model.tellers]
            assert (values - look).square().mean() < 0.7 * (values.roll(1, 1) - look).square().mean()
