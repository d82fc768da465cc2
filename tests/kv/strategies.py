"""Random layer mixes for property tests: any retention, head size, format and state, small enough to brute-force."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import strategies as st

from windowpane.kv import layout as layout_module
from windowpane.kv.caches import Cache, StateCache, StatePart, TokenCache
from windowpane.kv.formats import FORMATS
from windowpane.kv.layout import Layout, group_caches, plan_layout, resolve_formats
from windowpane.kv.retention import Chunk, Cross, Full, Window

token_retentions = st.one_of(
    st.just(Full()),
    st.builds(Window, st.integers(1, 200)),
    st.builds(Chunk, st.integers(1, 200)),
    st.builds(Cross, st.integers(1, 100)),
)


@st.composite
def caches_of_one_model(draw: st.DrawFn) -> list[Cache]:
    retentions = draw(st.lists(token_retentions, min_size=0, max_size=4, unique=True))
    caches: list[Cache] = []
    for retention in retentions:
        heads = draw(st.integers(1, 4))
        dim = draw(st.sampled_from([8, 16, 24, 64, 72]))
        latent = draw(st.booleans())
        for _ in range(draw(st.integers(1, 6))):
            caches.append(TokenCache(len(caches), retention, heads, dim, dim, latent))
    if draw(st.booleans()) or not caches:
        heads, elements, slots = draw(st.integers(1, 4)), draw(st.integers(1, 3000)), draw(st.integers(1, 2))
        for _ in range(draw(st.integers(1, 6))):
            caches.append(StateCache(len(caches), (StatePart("recurrent", heads, elements),), slots))
    return caches


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    caches = draw(caches_of_one_model())
    fmt = draw(st.sampled_from(list(FORMATS)))
    block = draw(st.sampled_from([None, 1, 3, 16]))
    formats = resolve_formats(fmt, group_caches(caches), "float32")
    # By themselves, groups this small are hardly ever cut into stripes.
    worth = draw(st.sampled_from([layout_module.FIRST_CUT_WORTH, -1.0]))
    with patch.object(layout_module, "FIRST_CUT_WORTH", worth):
        return plan_layout(caches, formats, "float32", block_tokens=block)
