"""Every setting of the stack: one typed model, from `trirank.toml`, then `TRIRANK_*`, then the command line.

An unknown or impossible value is an error at start that names the key. Read once by the wiring; everything else
gets what it needs as arguments.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from infra.engine.names import check_names
from infra.errors import ConfigurationError

PREFIX = "TRIRANK_"
DEFAULT_FILE = "trirank.toml"
# Variables with our prefix that are not settings.
_NOT_SETTINGS = frozenset({"TRIRANK_CONFIG"})


def _engines(given: object) -> object:
    """Names separated by commas, or a list of them."""
    names = [name.strip() for name in given.split(",") if name.strip()] if isinstance(given, str) else given
    return check_names(names) if isinstance(names, list | tuple) and all(isinstance(n, str) for n in names) else names


Engines = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_engines)]


class Settings(BaseSettings):
    """Settings of one stack."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    stack: str = Field(
        default="trirank", pattern=r"^[a-z][a-z0-9_-]{0,40}$", description="Prefix of Redis keys and topics."
    )
    home: Path = Field(
        default=Path(".trirank"), description="Folder for caches, releases and the state of a running stack."
    )
    release: Path | None = Field(default=None, description="Release directory to serve.")
    host: str = Field(default="127.0.0.1", description="Address the gateways listen on.")
    port: int = Field(default=8000, ge=1, le=65535, description="Port all gateways share.")
    redis: str | None = Field(default=None, description="redis:// URL; none starts an embedded server.")
    kafka: str | None = Field(default=None, description="HOST:PORT of a broker; none starts an embedded one.")
    shards: int = Field(default=1, ge=1, le=256, description="Parameter-server shards.")
    shard_replicas: int = Field(
        default=1, ge=1, le=16, description="Processes that serve each shard's rows; all follow the log."
    )
    shard_device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="Where tables lie: auto (a GPU where gpus_per_shard gives one), cpu, cuda or cuda:n.",
    )  # fmt: skip
    gpus_per_shard: float = Field(
        default=0.0, ge=0.0, le=1.0, description="Part of a GPU that Ray sets aside for each shard process."
    )
    partitions: int = Field(
        default=8, ge=1, le=1024, description="Partitions of the embeddings topic; at least `shards`."
    )
    gateways: int = Field(default=2, ge=1, le=64, description="Gateway processes on the one port.")
    edge_replicas: int = Field(default=1, ge=1, le=64, description="Edge ranker replicas.")
    rerank_replicas: int = Field(default=1, ge=1, le=64, description="Reranker replicas.")
    engines: Path | None = Field(default=None, description="Folder of built engines (default: RELEASE.engines).")
    edge_engines: Engines = Field(
        default=(),
        description="Engines an edge replica tries, in order: `kind` or `kind:precision`; none is automatic.",
    )
    rerank_engines: Engines = Field(default=(), description="The same for a rerank replica.")
    rank_max_requests: int = Field(
        default=0, ge=0, le=1024, description="Requests a rank replica runs as one batch; 0: as its engine likes."
    )
    rank_max_rows: int = Field(
        default=0, ge=0, le=1 << 20, description="Candidates in one such batch, all requests; 0: as its engine likes."
    )
    recall_k: int = Field(default=500, ge=1, le=2000, description="Candidates recalled when a request brings none.")
    rerank_depth: int = Field(default=100, ge=1, le=512, description="Candidates the reranker sees.")
    deadline_ms: float = Field(default=100.0, gt=0, le=60000, description="Deadline of a request that names none.")
    max_in_flight: int = Field(
        default=64, ge=1, le=10000, description="Requests one gateway works on; more are refused."
    )
    table_headroom: float = Field(
        default=2.0, ge=1.0, le=100.0, description="Table capacity over the rows of the release."
    )
    table_min_capacity_rows: int = Field(default=65536, ge=1, description="Least capacity of a table.")
    table_images: bool = Field(
        default=True, description="Shards on one host share the rows of equal tables (host memory, no tiers)."
    )
    snapshot_interval_s: float = Field(
        default=30.0, gt=0, description="Seconds between snapshots of a shard that changed."
    )
    snapshot_keep: int = Field(default=2, ge=1, le=100, description="Full snapshots kept, with the deltas after them.")
    snapshot_deltas: int = Field(default=8, ge=0, le=1000, description="Delta snapshots between two full ones.")
    tier_hot_bytes: int | None = Field(
        default=None, ge=1 << 20, description="Memory for hot rows per shard, all tables; none holds every row."
    )
    tier_warm_bytes: int = Field(default=0, ge=0, description="Host memory for rows below the hot ones, per shard.")
    tier_cold: bool = Field(default=True, description="Keep the rows that find no room in Redis, or refuse them.")
    tier_eviction: Literal["lru", "lfu", "ttl"] = Field(default="lfu", description="Which rows leave a full tier.")
    tier_half_life_s: float = Field(default=3600.0, ge=600.0, description="Counts of uses halve in this time (lfu).")
    tier_ttl_s: float = Field(default=86400.0, gt=0, description="Rows leave hot and warm after this time (ttl).")
    tier_admission: int = Field(
        default=1, ge=1, le=15, description="Times a row that is not held is asked for before it is fetched."
    )
    tier_new_keys: Literal["insert", "cold_only", "if_admitted"] = Field(
        default="insert", description="Where an update puts a key that is not held."
    )
    tier_negative_ttl_s: float = Field(
        default=30.0, gt=0, description="Seconds for which a key that is nowhere is not looked for again."
    )
    tier_leaving_rows: int = Field(
        default=65536, ge=1, description="Rows that may wait for Redis before the stream waits, per table."
    )
    hot_set_rows: int = Field(
        default=100_000, ge=0, description="Rows per table that a starting shard has ready first."
    )
    hot_set_interval_s: float = Field(default=5.0, gt=0, description="Seconds between notes of which rows those are.")
    precision_max_auc_loss_pct: float = Field(
        default=0.05, ge=0, le=100, description="AUC that FP16 or INT8 may lose against FP32, relative."
    )
    precision_max_log_loss_rise_pct_fp16: float = Field(
        default=0.05, ge=0, le=100, description="Log-loss that FP16 may add to FP32's, relative."
    )
    precision_max_log_loss_rise_pct_int8: float = Field(default=1.0, ge=0, le=100, description="The same for INT8.")
    precision_max_logit_rmse_fp16: float = Field(
        default=0.02, ge=0, description="Root mean square by which FP16 may move logits."
    )
    precision_max_logit_rmse_int8: float = Field(default=0.15, ge=0, description="The same for INT8.")
    precision_min_overlap_at_20_fp16: float = Field(
        default=0.99, ge=0, le=1, description="Share of FP16's first 20 that has to be among FP32's."
    )
    precision_min_overlap_at_20_int8: float = Field(default=0.97, ge=0, le=1, description="The same for INT8.")
    precision_requests: int = Field(
        default=1000, ge=10, le=100_000, description="Held-out requests that precisions are compared on."
    )
    calibration_method: Literal["percentile", "min-max", "entropy"] = Field(
        default="percentile", description="How INT8 scales are chosen: 99.99 percentile, min-max, or entropy."
    )
    calibration_days: float = Field(
        default=7.0, gt=0, description="The calibration requests come from the last days of the training period."
    )
    calibration_requests: int = Field(default=256, ge=1, le=100_000, description="Requests that INT8 is calibrated on.")
    gray_lease_s: float = Field(
        default=3.0, ge=3.0, le=50.0,
        description="Seconds for which gateways serve a candidate release through a Redis that is silent; an abort "
        "waits this long for a gateway that does not answer.",
    )  # fmt: skip
    control_token: str | None = Field(
        default=None,
        min_length=16,
        max_length=256,
        pattern=r"^[\x21-\x7e]+$",
        description="Token of the release API; none makes one and keeps it in the home folder.",
    )
    log_level: str = Field(default="INFO", pattern=r"^(DEBUG|INFO|WARNING|ERROR)$")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Command line over environment over file."""
        file = Path(os.environ.get("TRIRANK_CONFIG", DEFAULT_FILE))
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=file)

    @property
    def embeddings_topic(self) -> str:
        """Topic of embedding updates."""
        return f"{self.stack}.embeddings"

    @property
    def feedback_topic(self) -> str:
        """Topic of feedback events."""
        return f"{self.stack}.feedback"

    @property
    def deadletter_topic(self) -> str:
        """Topic of records that could not be applied."""
        return f"{self.stack}.deadletter"

    @property
    def run_dir(self) -> Path:
        """Folder of the running stack: pid file, logs, sockets, metrics, snapshots."""
        return self.home / "run"


def load_settings(**given: Any) -> Settings:
    """Read the settings; `given` are command-line values, None means not given. Raises ConfigurationError."""
    unknown = [
        name
        for name in os.environ
        if name.startswith(PREFIX)
        and name not in _NOT_SETTINGS
        and name[len(PREFIX) :].lower() not in Settings.model_fields
    ]
    if unknown:
        raise ConfigurationError(f"{unknown[0]}: there is no such setting; see `trirank up --help`")
    config = os.environ.get("TRIRANK_CONFIG")
    if config and not Path(config).is_file():
        raise ConfigurationError(f"TRIRANK_CONFIG: there is no file {config}")
    try:
        settings = Settings(**{k: v for k, v in given.items() if v is not None})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{config or DEFAULT_FILE} is no TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "extra_forbidden":
            name = ".".join(str(part) for part in first["loc"])
            raise ConfigurationError(f"{name}: there is no such setting; see `trirank up --help`") from error
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(f"{key}: {first['msg']} (got {first['input']!r})") from error
    if settings.partitions < settings.shards:
        raise ConfigurationError(f"partitions: {settings.partitions} is fewer than shards ({settings.shards})")
    if settings.shard_device == "cpu" and settings.gpus_per_shard > 0:
        raise ConfigurationError("gpus_per_shard: shards on the cpu use no GPU; set it to 0, or shard_device to auto")
    return settings
