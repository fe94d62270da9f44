"""Finding the family of a chat template: over templates of our own, and over a collection where it is present."""

from __future__ import annotations

from pathlib import Path

import pytest

from singletree import families, parse
from singletree.conversation import Reasoning, ToolCall
from singletree.drafting.template_turns import try_family
from singletree.parsing.render_turn import render_turn
from singletree.server.models.chat_format import template_alone

OWN = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
COLLECTION = Path(__file__).parents[3] / "shared" / "templates"
UNKNOWN = "plain"

FOUND_AS = {
    "mimo": "qwen3_coder",
    "minicpmv": "qwen3_coder",
    "minimax_append_think": "minimax_m2",
    "nanbeige": "qwen3_coder",
    "trinity": "qwen3",
}
"""Families without a fingerprint, whose format is another one's: only ``--tool-call-parser`` chooses them."""

NOT_FOUND = {"ernie45": "qwen3"}
"""Families whose fingerprint is shorter than one that occurs in their templates as well, and the one that wins."""

SAME_MARKERS = {
    "beam": "a call ends in the marker that ends a text, so the trial takes it for the end of the turn",
    "mimo": "an awkward string begins on a line of its own in the other family's format",
}
"""Families of which not every turn of their template is compared, and why."""

# The files of the template collection, by family. Under "basic" are templates that think between the usual tags and
# show no call; under "plain" those that show neither.
EXPECTED = {
    "apertus": "llama.cpp/Apertus-8B-Instruct vllm/tool_chat_template_apertus",
    "apriel": "llama.cpp/Apriel-1.6-15b-Thinker-fixed llama.cpp/unsloth-Apriel-1.5",
    "basic": """
        axolotl/phi_4 llama.cpp/HuggingFaceTB-SmolLM3-3B llama.cpp/LFM2.5-Instruct
        llama.cpp/llama-cpp-rwkv-world
    """,
    "cohere_command3": """
        axolotl/command_a axolotl/command_a_rag axolotl/command_a_tool_use
        llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use
    """,
    "cohere_command4": "llama.cpp/Cohere2MoE",
    "command_r": "llama.cpp/CohereForAI-c4ai-command-r-plus-tool_use npm_lenml/command_r_plus.tool_use",
    "deepseek_v3": """
        axolotl/deepseek_v3 llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Llama-8B
        llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B llama.cpp/llama-cpp-deepseek-r1
        npm_lenml/deepseek_v3 trl/deepseek_r1_distill trl/deepseekv3 vllm/tool_chat_template_deepseekr1
        vllm/tool_chat_template_deepseekv3
    """,
    "deepseek_v3_1": "llama.cpp/deepseek-ai-DeepSeek-V3.1 vllm/tool_chat_template_deepseekv31",
    "deepseek_v3_2": "llama.cpp/deepseek-ai-DeepSeek-V3.2",
    "deepseek_v4": "llama.cpp/deepseek-ai-DeepSeek-V4-Flash-0731 llama.cpp/deepseek-ai-DeepSeek-V4",
    "exaone4": "axolotl/exaone4",
    "firefunction": "llama.cpp/fireworks-ai-llama-3-firefunction-v2",
    "functionary_v3_1": "llama.cpp/meetkai-functionary-medium-v3.1",
    "functionary_v3_2": "llama.cpp/meetkai-functionary-medium-v3.2",
    "functiongemma": "vllm/tool_chat_template_functiongemma",
    "gemma4": """
        axolotl/gemma4 axolotl/gemma4_unified dynamo/gemma4_tool llama.cpp/ggml-vocab-gemma-4.embedded
        llama.cpp/google-gemma-4-31B-it-interleaved llama.cpp/google-gemma-4-31B-it trl/diffusion_gemma
        trl/gemma4 trl/gemma4_v2 trl/gemma4_v3 trl/gemma4_v4 trl/gemma4_v5 vllm/tool_chat_template_gemma4
    """,
    "gigachat3": "llama.cpp/GigaChat3-10B-A1.8B llama.cpp/GigaChat3.1-10B-A1.8B",
    "glm45": "llama.cpp/GLM-4.6 trl/glm4moe vllm/tool_chat_template_glm4",
    "glm47": "llama.cpp/GLM-4.7-Flash",
    "gpt_oss": "llama.cpp/openai-gpt-oss-120b trl/gptoss",
    "granite": "llama.cpp/ibm-granite-granite-3.3-2B-Instruct vllm/tool_chat_template_granite",
    "granite4": "llama.cpp/ibm-granite-granite-4.0 llama.cpp/ibm-granite-granite-4.1",
    "granite_20b_fc": "vllm/tool_chat_template_granite_20b_fc",
    "hermes": """
        axolotl/falcon_h1 axolotl/qwen_25 llama.cpp/MiMo-VL
        llama.cpp/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use
        llama.cpp/NousResearch-Hermes-3-Llama-3.1-8B-tool_use llama.cpp/Qwen-Qwen2.5-7B-Instruct
        npm_lenml/qwen2_5 trl/qwen2_5 trl/qwen3_instruct_2507 trl/qwen3_vl vllm/tool_chat_template_hermes
    """,
    "hunyuan_a13b": "vllm/tool_chat_template_hunyuan_a13b",
    "hy_v3": "llama.cpp/tencent-Hy3",
    "internlm": "vllm/tool_chat_template_internlm2_tool",
    "jamba": "axolotl/jamba",
    "kimi_k2": """
        llama.cpp/Kimi-K2-Instruct llama.cpp/Kimi-K2-Thinking llama.cpp/moonshotai-Kimi-K2 smg/kimi_k25
    """,
    "kimi_k3": "llama.cpp/Kimi-K3",
    "lfm2": """
        llama.cpp/LFM2-8B-A1B llama.cpp/LFM2.5-8B-A1B trl/lfm2 trl/lfm2_2_5 trl/lfm2_2_5_v2
        trl/lfm2_2_5_vl trl/lfm2_v2
    """,
    "ling3": "llama.cpp/inclusionai-ling-3.0-flash",
    "llama3_json": """
        axolotl/llama3_2_vision axolotl/llama4 llama.cpp/meta-llama-Llama-3.1-8B-Instruct
        llama.cpp/meta-llama-Llama-3.2-3B-Instruct llama.cpp/meta-llama-Llama-3.3-70B-Instruct
        npm_lenml/llama3_2 trl/llama3_1 trl/llama3_2 vllm/tool_chat_template_llama3.1_json
        vllm/tool_chat_template_llama3.2_json vllm/tool_chat_template_llama4_json
    """,
    "llama4_pythonic": "vllm/tool_chat_template_llama4_pythonic",
    "minicpm5": "llama.cpp/openbmb-MiniCPM5-1B",
    "minimax_m1": "llama.cpp/MiniMax-M1",
    "minimax_m2": "llama.cpp/MiniMax-M2 smg/minimax_m2",
    "minimax_m3": "llama.cpp/MiniMax-M3 smg/minimax_m3",
    "mistral": """
        axolotl/mistral_v2v3 axolotl/mistral_v3_tekken llama.cpp/Mistral-Small-3.2-24B-Instruct-2506
        llama.cpp/mistralai-Ministral-3-14B-Reasoning-2512 llama.cpp/mistralai-Mistral-Nemo-Instruct-2407
        llama.cpp/unsloth-mistral-Devstral-Small-2507 npm_lenml/mistral_nemo
        vllm/tool_chat_template_mistral vllm/tool_chat_template_mistral3
        vllm/tool_chat_template_mistral_parallel
    """,
    "muse_glimmer": "llama.cpp/muse-glimmer trl/muse_glimmer vllm/tool_chat_template_muse_glimmer",
    "nemotron_nano": "llama.cpp/NVIDIA-Nemotron-Nano-v2",
    "nemotron_v3": """
        llama.cpp/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 trl/nemotron_3_5_lightning trl/nemotron_3_nano
        trl/nemotron_3_super trl/nemotron_3_ultra
    """,
    "phi4": "vllm/tool_chat_template_phi4_mini",
    "poolside_v1": """
        llama.cpp/poolside-Laguna-S-2.1 llama.cpp/poolside-Laguna-XS-2.1 llama.cpp/poolside-Laguna-XS.2
    """,
    "pythonic": """
        vllm/tool_chat_template_gemma3_pythonic vllm/tool_chat_template_llama3.2_pythonic
        vllm/tool_chat_template_toolace
    """,
    "qwen3": """
        axolotl/qwen3 axolotl/qwen3_5 llama.cpp/Bielik-11B-v3.0-Instruct llama.cpp/Qwen-QwQ-32B
        llama.cpp/Qwen-Qwen3-0.6B npm_lenml/qwen3 trl/qwen3 vllm/qwen3
    """,
    "qwen3_coder": """
        llama.cpp/Qwen3-Coder llama.cpp/Qwen3.5-4B trl/qwen3_5_nothink trl/qwen3_5_think trl/qwen3_6
        trl/qwen3_8 vllm/qwen35 vllm/tool_chat_template_qwen3coder
    """,
    "reka": "llama.cpp/Reka-Edge",
    "seed_oss": "llama.cpp/ByteDance-Seed-OSS",
    "solar_open": "llama.cpp/upstage-Solar-Open-100B",
    "spark25": "llama.cpp/Spark2.5",
    "step3p5": "llama.cpp/StepFun3.5-Flash",
    "xlam": "vllm/tool_chat_template_xlam_llama vllm/tool_chat_template_xlam_qwen",
    "plain": """
        axolotl/alpaca axolotl/aya axolotl/chatml axolotl/cohere axolotl/deepseek_v2 axolotl/exaone
        axolotl/gemma axolotl/gemma3 axolotl/gemma3n axolotl/llama3 axolotl/llava axolotl/metharme
        axolotl/mistral_v1 axolotl/mistral_v7_tekken axolotl/nemotron_h axolotl/phi_3 axolotl/phi_35
        axolotl/pixtral axolotl/qwen2_vl llama.cpp/google-gemma-2-2b-it
        llama.cpp/microsoft-Phi-3.5-mini-instruct npm_lenml/chatglm3 npm_lenml/command_r_plus.default
        npm_lenml/command_r_plus.rag npm_lenml/gemini npm_lenml/gemma3 npm_lenml/gpt4 npm_lenml/internlm2
        npm_lenml/llama3 npm_lenml/llama3_1 npm_lenml/qwen1_5 trl/cohere trl/cohere2 trl/gemma trl/gemma3
        trl/idefics3 trl/llama3 trl/llava_next trl/phi3 trl/phi3_5 trl/qwen2_5_vl trl/smolvlm
        vllm/step5_vl
    """,
}
FAMILY_OF = {file: family for family, files in EXPECTED.items() for file in files.split()}


def test_every_family_with_calls_has_a_template() -> None:
    assert {path.stem for path in OWN} == {family.name for family in families.table() if family.forms}


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_a_template_of_our_own_is_found(path: Path) -> None:
    found = families.find(path.read_text(encoding="utf-8"))
    assert found.known
    assert found.family.name == (FOUND_AS | NOT_FOUND).get(path.stem, path.stem)


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_the_family_reads_what_its_template_writes(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    found = families.find(source).family
    family = families.get(path.stem) if path.stem in NOT_FOUND else found
    trials = try_family(family, template_alone(source))
    assert len(trials) >= 8
    failed = {trial.rendered.case for trial in trials if not trial.agrees}
    assert bool(failed) is (path.stem in SAME_MARKERS), failed


def test_every_template_of_the_collection_is_found_or_unknown() -> None:
    if not COLLECTION.is_dir():
        pytest.skip("the collection of chat templates is not here")
    found = {}
    for path in COLLECTION.rglob("*.jinja"):
        seen = families.find(path.read_text(encoding="utf-8"))
        assert seen.known is (seen.family.name != UNKNOWN)
        assert seen.why
        found[str(path.relative_to(COLLECTION).with_suffix(""))] = seen.family.name
    assert found == FAMILY_OF


def test_what_thinks_between_the_usual_tags_thinks_here_too() -> None:
    template = "{{ '<think>' }}</think> <tool_calls> </tool_calls>"
    found = families.find(template).family
    assert found.reasoning
    assert found.forms


@pytest.mark.parametrize("template", [None, "", "{{ messages[0].content }}"])
def test_nothing_to_go_by_is_plain_text(template: str | None) -> None:
    found = families.find(template)
    assert (found.family.name, found.known) == (UNKNOWN, False)


def test_markers_are_spelled_as_the_template_spells_them() -> None:
    template = "{%- set HYTK = ':6124c78e' %}{{ '<tool_calls' + HYTK }}<tool_sep<arg_key"
    family = families.find(template).family
    assert family.name == "hy_v3"
    text = render_turn(family, [Reasoning("plan"), ToolCall("f", '{"s": "x"}')])
    assert text.startswith("<think:6124c78e>plan</think:6124c78e>")
    assert "<tool_sep:6124c78e>" in text
    assert [p.name for p in parse(family, text).tool_calls] == ["f"]
    assert [p.name for p in parse(family, text.replace(":6124c78e", "")).tool_calls] == ["f"]
