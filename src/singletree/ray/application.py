"""The Ray Serve application: one deployment for the HTTP server, and one for each engine.

Each engine is a deployment of its own, with one replica. So an engine keeps its name when its replica is replaced,
every server replica addresses each engine directly, and the router of the pool chooses among them by prefix and load,
as it does among engines at URLs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cyclopts import App
from cyclopts.config import Dict
from cyclopts.exceptions import CycloptsError
from ray import serve
from ray.serve import Application

from singletree.cli.flags import read_settings, with_each_model
from singletree.errors import BadConfiguration
from singletree.ray.replicas import EngineReplica, ServerReplica, can_publish
from singletree.server.settings.config import Config

GPU_FLAGS: dict[str, tuple[str, ...]] = {
    "vllm": ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
    "sglang": ("--tensor-parallel-size", "--tp-size", "--tp", "--pipeline-parallel-size", "--pp-size"),
}
"""For the engines that run on GPUs: the arguments whose product is the number of GPUs of one engine."""

_MAX_ONGOING_REQUESTS = 100_000
"""No limit: singletree has queues of its own, which tell clients what they wait for."""

_SERVER_LIMITS: dict[str, Any] = {
    "max_ongoing_requests": _MAX_ONGOING_REQUESTS,
    # A replica that is stopped finishes its turns first.
    "graceful_shutdown_timeout_s": 900.0,
}
_AUTOSCALING = {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 64}
_ENGINE_LIMITS: dict[str, Any] = {
    "num_replicas": 1,
    "max_ongoing_requests": _MAX_ONGOING_REQUESTS,
    "graceful_shutdown_timeout_s": 900.0,
}


@dataclass(frozen=True, slots=True)
class RaySettings:
    """What the application is made from.

    Attributes:
        engines: how many engines each model has.
        engine_options: options of Ray Serve for the deployment of each engine, such as ``ray_actor_options`` and
            ``placement_group_bundles``.
        server_options: options of Ray Serve for the deployment of the server, such as ``autoscaling_config``.
        publish_kv_events: whether engines that can do so publish what their prefix caches hold, on ports of their
            nodes, for the router.
    """

    config: Config
    engines: int = 1
    publish_kv_events: bool = False
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    server_options: Mapping[str, Any] = field(default_factory=dict)


def build_application(arguments: dict[str, Any]) -> Application:
    """Build the Ray Serve application, as ``serve run singletree.ray:app KEY=VALUE…`` and Serve's YAML files do.

    Args:
        arguments: ``engines``, ``publish_kv_events``, ``engine_options`` and ``server_options`` (``RaySettings``); all
            other keys are flags of ``singletree serve``, such as ``config``, the path of a TOML file.

    Raises:
        BadConfiguration: a setting is wrong.
    """
    settings = read_ray_settings(arguments)
    models = settings.config.each_model or (settings.config,)
    handles = []
    for number, model in enumerate(models):
        prefix = "engine" if len(models) == 1 else f"engine-{number}"
        handles.append(
            [_engine(f"{prefix}-{each}", model, settings) for each in range(_engines(model, settings))]
        )
    options = _SERVER_LIMITS | {"name": "server"} | _server_replicas(settings) | dict(settings.server_options)
    return serve.deployment(serve.ingress()(ServerReplica)).options(**options).bind(settings.config, handles)


def read_ray_settings(arguments: Mapping[str, Any]) -> RaySettings:
    """Return the settings in ``arguments``, in the environment and in the file that they name.

    Raises:
        BadConfiguration: a setting is unknown or wrong.
    """
    flags = dict(arguments)
    engines = flags.pop("engines", 1)
    if not str(engines).isdecimal() or not 1 <= int(engines) <= 4096:
        raise BadConfiguration(
            f"engines is {engines!r}; give the number of engines of each model, from 1 to 4096"
        )
    publishes = str(flags.pop("publish_kv_events", False)).lower()
    if publishes not in ("true", "false"):
        raise BadConfiguration(f"publish_kv_events is {publishes!r}; give true or false")
    options = {}
    for name in ("engine_options", "server_options"):
        options[name] = flags.pop(name, {})
        if not isinstance(options[name], Mapping):
            raise BadConfiguration(f"{name} is {options[name]!r}; give a mapping of options of Ray Serve")
    config = with_each_model(_read_config(flags))
    if config.built_in:
        # A replica starts its engine at once: one that waits for its first request would be fetched for nothing.
        config = config.each_model[0]
    for model in config.each_model or (config,):
        if model.engine == "auto" and not model.engine_url:
            raise BadConfiguration(
                "engine is not set: the machine that serves HTTP cannot choose it for those that generate; give "
                "engine=vllm, sglang, llamacpp or scripted"
            )
        if model.idle_unload is not None:
            raise BadConfiguration("idle-unload stops an engine of this process; leave it out with Ray")
    settings = RaySettings(config, int(engines), publishes == "true", **options)
    if settings.publish_kv_events and not any(
        _publishes(model, settings) for model in config.each_model or (config,)
    ):
        raise BadConfiguration(
            "publish_kv_events: no model has several engines here that can publish KV events, and router_mode kv; give "
            "engine=vllm or sglang, without --kv-events-config and data-parallel ranks in its arguments, or leave "
            "publish_kv_events out"
        )
    return settings


def _publishes(config: Config, settings: RaySettings) -> bool:
    """Return whether the engines of a model publish what their prefix caches hold: the router reads it."""
    routed = _engines(config, settings) > 1 and config.router_mode == "kv"
    return settings.publish_kv_events and routed and can_publish(config)


def _read_config(flags: Mapping[str, Any]) -> Config:
    """Return the settings: ``flags`` win over the environment, and that over the file that they name."""
    given = Dict({key.replace("_", "-"): value for key, value in flags.items()}, use_commands_as_keys=False)
    cli = App(config=(given, read_settings))

    @cli.default
    def read(config: Config = Config()) -> Config:  # noqa: B008 (frozen)
        return config

    try:
        config: Config = cli([], print_error=False, exit_on_error=False, result_action="return_value")
    except CycloptsError as error:
        raise BadConfiguration(str(error).strip()) from None
    return config


def _engines(config: Config, settings: RaySettings) -> int:
    """Return how many engines Ray runs for a model: none if they run elsewhere, at URLs."""
    return 0 if config.engine_url else settings.engines


def _engine(name: str, config: Config, settings: RaySettings) -> Application:
    options = _ENGINE_LIMITS | _resources(config) | dict(settings.engine_options)
    deployment = serve.deployment(EngineReplica).options(name=name, **options)
    return deployment.bind(config, _publishes(config, settings))


def _resources(config: Config) -> dict[str, Any]:
    """Return the GPUs that one engine needs, all on one node: a placement group with one bundle."""
    gpus = gpus_of(config)
    if not gpus:
        return {}
    return {
        "ray_actor_options": {"num_cpus": 1, "num_gpus": gpus},
        "placement_group_bundles": [{"CPU": 1, "GPU": gpus}],
        "placement_group_strategy": "STRICT_PACK",
    }


def gpus_of(config: Config) -> int:
    """Return how many GPUs one engine of the model needs, by the engine's arguments."""
    if config.engine not in GPU_FLAGS:
        return 0
    gpus, words = 1, list(config.engine_arguments)
    for at, word in enumerate(words):
        flag, has_value, value = word.partition("=")
        value = value if has_value else next(iter(words[at + 1 : at + 2]), "")
        if flag.replace("_", "-") in GPU_FLAGS[config.engine] and value.isdecimal():
            gpus *= int(value)
    return gpus


def _server_replicas(settings: RaySettings) -> dict[str, Any]:
    """Return how many server replicas there are: one where no capsule key lets the others read its capsules."""
    if "num_replicas" in settings.server_options or not settings.config.capsule_key:
        return {}
    return {"autoscaling_config": _AUTOSCALING}
