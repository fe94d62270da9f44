"""Every name that another server has for a parser resolves to a family here."""

from __future__ import annotations

import pytest

from singletree import families
from singletree.errors import BadConfiguration
from singletree.parsing.family import Family

# dynamo._core.get_tool_parser_names() and get_reasoning_parser_names(), Dynamo 1.6.1
DYNAMO_TOOLS = """deepseek-v4 deepseek_v3 deepseek_v3_1 deepseek_v3_2 deepseek_v4 deepseek_v41 deepseekv4 default
gemma-4 gemma4 glm45 glm47 harmony hermes inkling jamba kimi-k3 kimi_k2 kimi_k25 kimi_k3 llama3_json minimax-m3
minimax-m3-nom minimax_m2 minimax_m3 minimax_m3_nom mistral muse muse_glimmer nemotron_deci nemotron_nano phi4
pythonic qwen25 qwen3 qwen3_coder"""
DYNAMO_REASONING = """basic deepseek-v4 deepseek_r1 deepseek_v3 deepseek_v3_1 deepseek_v3_2 deepseek_v4 deepseek_v41
deepseekv4 gemma-4 gemma4 glm45 glm47 gpt_oss granite inkling kimi kimi-k3 kimi_k2 kimi_k25 kimi_k3 minimax-m3
minimax_append_think minimax_m2 minimax_m3 mistral muse muse_glimmer nemotron3 nemotron_deci nemotron_nano
nemotron_v3 qwen3 qwen3_coder step3"""
# vllm/tool_parsers and vllm/reasoning, vLLM 0.33
VLLM_TOOLS = """apertus beam cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4
deepseek_v41 dots ernie45 functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc granite4 hermes hf
hunyuan_a13b hy_v3 hy_v4 inkling internlm jamba k2_horizon kimi_k2 kimi_k3 lfm2 ling3 llama3_json llama4_json
llama4_pythonic longcat mimo minicpm5 minimax_m2 minimax_m3 mistral muse muse_glimmer musespark1x olmo3 openai
phi4_mini_json plamo3 poolside_v1 pythonic qwen3_coder qwen3_json qwen3_xml seed_oss step3 step3p5 step5 xlam"""
VLLM_REASONING = """beam cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 ernie45
gemma4 glm45 glm47 granite granite_thinking_parser hf holo2 hunyuan_a13b hy_v3 hy_v4 inkling k2_horizon kimi_k2
kimi_k3 ling3 mimo minicpmv minimax_m2 minimax_m2_append_think minimax_m3 mistral muse muse_glimmer musespark1x
nemotron_v3 olmo3 openai_gptoss plamo3 poolside_v1 qwen3 seed_oss step3 step3p5 step5"""
# sglang/srt/function_call and sglang/srt/parser, SGLang 0.5.23
SGLANG_TOOLS = """apertus2509 beam cohere_command4 deepseekv3 deepseekv31 deepseekv32 deepseekv4 deepseekv41 dots
gemma4 gigachat3 gigachat35 glm glm45 glm47 gpt-oss hermes hunyuan inkling interns1 iquest_q1 k2_horizon kimi_k2
kimi_k3 lfm2 ling3 llama3 mimo minicpm5 minimax-m2 minimax-m3 mistral muse nanbeige poolside_v1 pythonic qwen
qwen25 qwen3_coder response_template spark25 step3 step3p5 trinity"""
SGLANG_REASONING = """apertus2509 beam cohere_command4 deepseek-r1 deepseek-v3 deepseek-v4 deepseek-v41 dots gemma4
gigachat35 glm45 gpt-oss granite_thinking_parser hunyuan inkling interns1 iquest_q1 k2_horizon kimi kimi_k2
kimi_k3 ling3 mimo minimax minimax-append-think minimax-m3 mistral muse nanbeige nemotron_3 poolside_v1 qwen3
qwen3-thinking response_template step3 step3p5"""

FROM_THE_CHECKPOINT = {"hf", "response_template"}

TOOLS = sorted({*DYNAMO_TOOLS.split(), *VLLM_TOOLS.split(), *SGLANG_TOOLS.split()} - FROM_THE_CHECKPOINT)
REASONING = sorted(
    {*DYNAMO_REASONING.split(), *VLLM_REASONING.split(), *SGLANG_REASONING.split()} - FROM_THE_CHECKPOINT
)


@pytest.mark.parametrize("name", TOOLS)
def test_tool_parsers_resolve(name: str) -> None:
    assert families.pair(tools=name).forms
    assert isinstance(families.get(name), Family)


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_parsers_resolve(name: str) -> None:
    assert families.pair(reasoning=name).reasoning


def test_one_name_may_mean_two_families() -> None:
    assert "<function=" in families.pair(tools="nemotron_nano").forms[0].call
    thinks = families.pair(reasoning="nemotron_nano")
    assert thinks.starts_open
    assert not thinks.forms


@pytest.mark.parametrize("name", sorted(FROM_THE_CHECKPOINT))
def test_names_without_a_format_of_their_own_are_refused_with_the_cure(name: str) -> None:
    with pytest.raises(BadConfiguration, match="leave the parser out"):
        families.get(name)


@pytest.mark.parametrize("name", ["", "no such"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(BadConfiguration, match="no model family"):
        families.get(name)


def test_a_half_that_a_family_lacks_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="'jamba' has no reasoning format"):
        families.pair(reasoning="jamba")
    with pytest.raises(BadConfiguration, match="'kimi' has no tool-call format"):
        families.pair(tools="kimi")


def test_no_name_means_two_families() -> None:
    seen: dict[str, str] = {}
    for family in families.table():
        for name in (family.name, *family.aliases):
            plain = name.lower().replace("-", "_").replace(".", "_")
            assert seen.setdefault(plain, family.name) == family.name
    assert {n.replace("-", "_") for n in families.names()} >= {t.replace("-", "_") for t in TOOLS}
