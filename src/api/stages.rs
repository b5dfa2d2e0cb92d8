//! Stages, and the props and acts inside them.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{NoParameters, operation::operations};
use crate::stages::Key;

/// The editors hold a stage id as an int32.
pub const LAST_STAGE: i32 = i32::MAX;

/// Props of one page of a list.
pub const MOST_LISTED: usize = 1000;

operations! {
    service "stage" on Stages;

    /// A new stage id, or the same one again when the request id is repeated.
    ///
    /// The request id is a UUID in `X-Request-ID`; over NATS in `Nats-Msg-Id`, or as `request_id` in the body.
    allocate_stage = AllocateStage(): NewStage => StageId {
        verb: "allocate",
        scope: Mint,
        success: 201,
        repeated: 200,
        limited_by_client: true,
        header: "X-Request-ID",
        routes: [Post "/stages"],
    }

    /// When and for which request a stage was allocated, and how much is inside.
    stage_info = GetStage(stage): NoParameters => Stage {
        verb: "info",
        scope: Mint,
        success: 200,
        routes: [Get "/stages/{stage}"],
    }

    /// Registers a prop by its soft object path. The same path again is the same prop.
    register_prop = RegisterProp(stage): NewProp => Prop {
        verb: "prop-register",
        scope: Mint,
        success: 201,
        repeated: 200,
        routes: [Post "/stages/{stage}/props"],
    }

    /// The registered props in the order of their ids; with a path, the one that has it.
    list_props = ListProps(stage): PropFilter => Props {
        verb: "prop-list",
        scope: Mint,
        success: 200,
        routes: [Get "/stages/{stage}/props"],
    }

    /// A registered prop by its id. Over NATS by its path as well.
    get_prop = GetProp(stage): OneProp => Prop {
        verb: "prop-get",
        scope: Mint,
        success: 200,
        routes: [Get "/stages/{stage}/props/{id}"],
    }

    /// Unregisters a prop. Its id is never given again, and acts that name it say so when they are resolved.
    unregister_prop = UnregisterProp(stage): PropId => Prop {
        verb: "prop-unregister",
        scope: Mint,
        success: 200,
        routes: [Delete "/stages/{stage}/props/{id}"],
    }

    /// Makes an act: the states that props shall take. Every prop must be registered.
    create_act = CreateAct(stage): NewAct => Act {
        verb: "act-create",
        scope: Mint,
        success: 201,
        routes: [Post "/stages/{stage}/acts"],
    }

    /// The acts of a stage in the order of their ids, without their states.
    list_acts = ListActs(stage): NoParameters => Acts {
        verb: "act-list",
        scope: Mint,
        success: 200,
        routes: [Get "/stages/{stage}/acts"],
    }

    /// An act with its states and its revision.
    get_act = GetAct(stage): ActId => Act {
        verb: "act-get",
        scope: Mint,
        success: 200,
        routes: [Get "/stages/{stage}/acts/{id}"],
    }

    /// Changes an act that is still at the revision that the caller has read; else it is a conflict.
    update_act = UpdateAct(stage): ChangedAct => Act {
        verb: "act-update",
        scope: Mint,
        success: 200,
        routes: [Put "/stages/{stage}/acts/{id}"],
    }

    /// What an act asks for, prop by prop in the order of their ids, saying which of them are registered no longer.
    resolve_act = ResolveAct(stage): ActId => ResolvedAct {
        verb: "act-resolve",
        scope: Mint,
        success: 200,
        routes: [Get "/stages/{stage}/acts/{id}/resolve"],
    }
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewStage {
    /// A UUID, if no header has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StageId {
    pub stage_id: i32,
    #[serde(skip)]
    pub repeated: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Stage {
    pub stage_id: i32,
    pub request_id: String,
    pub allocated_at: DateTime<Utc>,
    /// Registered props.
    pub props: u32,
    pub acts: u32,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewProp {
    /// Such as `/Game/Maps/MyLevel.MyLevel:PersistentLevel.BP_Door_42`. Letter case does not matter, as in the engine.
    pub path: String,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PropFilter {
    /// Only the prop with this path, alone and not in a list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Props behind this id: the `next` of the page before.
    #[serde(default)]
    pub after: i32,
    /// At most so many; 1000 if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1000, default = 1000)]
    pub limit: Option<i64>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OneProp {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PropId {
    pub id: i32,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Prop {
    /// `{stage, 0, prop}`.
    #[schema(value_type = String)]
    pub key: Key,
    pub prop_id: i32,
    pub path: String,
    /// The path was registered before.
    #[serde(skip)]
    pub repeated: bool,
}

/// One prop if a path was asked for, else a page of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum Props {
    Page {
        props: Vec<Prop>,
        /// Where the next page begins, if there is one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        next: Option<i32>,
    },
    One(Prop),
}

/// The state that each prop shall take, by the prop's key: `{"{101, 0, 1}": 2}`.
pub type TargetPropStates = BTreeMap<Key, i32>;

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewAct {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default)]
    #[schema(value_type = BTreeMap<String, i32>)]
    pub target_prop_states: TargetPropStates,
    /// A new act has none; 0 says the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<i64>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ActId {
    pub id: i32,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangedAct {
    pub id: i32,
    /// As it was if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// All of them: what is not named is no longer part of the act.
    #[schema(value_type = BTreeMap<String, i32>)]
    pub target_prop_states: TargetPropStates,
    /// The one that was read.
    pub revision: i64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Act {
    /// `{stage, act, 0}`.
    #[schema(value_type = String)]
    pub key: Key,
    pub act_id: i32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[schema(value_type = BTreeMap<String, i32>)]
    pub target_prop_states: TargetPropStates,
    /// Goes up by one with each change.
    pub revision: i64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Acts {
    pub acts: Vec<ActSummary>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ActSummary {
    /// `{stage, act, 0}`.
    #[schema(value_type = String)]
    pub key: Key,
    pub act_id: i32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub revision: i64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ResolvedAct {
    pub props: Vec<ResolvedProp>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ResolvedProp {
    /// `{stage, 0, prop}`.
    #[schema(value_type = String)]
    pub key: Key,
    pub path: String,
    pub state: i32,
    /// Whether the prop is still registered.
    pub registered: bool,
}
