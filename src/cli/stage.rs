//! `tidemark stage`: stages of a running deployment, their props and acts.

use std::str::FromStr;

use clap::Subcommand;
use uuid::Uuid;

use super::{Failure, print, print_row, screen, show};
use crate::{
    api::{
        Context, Name, NoParameters,
        stages::{
            Act, ActId, AllocateStage, ChangedAct, MOST_LISTED, NewAct, NewProp, NewStage, OneProp, Prop, PropFilter,
            PropId, Props, TargetPropStates,
        },
    },
    client::Client,
    stages::Key,
};

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Allocate a stage id.
    Allocate {
        /// The same one gets the same stage again. A new one if not given
        #[arg(long, value_name = "UUID")]
        request_id: Option<Uuid>,
    },
    /// Show when and for which request a stage was allocated, and how much is inside.
    Info { stage: i32 },
    /// Register a prop by its soft object path.
    Register { stage: i32, path: String },
    /// Unregister a prop. Its id is never given again.
    Unregister { stage: i32, prop: i32 },
    /// List the registered props.
    Props { stage: i32 },
    /// Show a prop, by its id or by its path.
    Prop { stage: i32, id_or_path: String },
    /// List the acts.
    Acts { stage: i32 },
    /// Show an act.
    Act { stage: i32, act: i32 },
    /// Make an act.
    CreateAct {
        stage: i32,
        #[arg(long)]
        name: Option<String>,
        /// Which state each prop shall take, such as 1=2 3=5
        states: Vec<PropState>,
    },
    /// Change an act: it has these states afterwards, and no others.
    UpdateAct {
        stage: i32,
        act: i32,
        /// The one that was read; if the act has changed since, nothing happens
        #[arg(long)]
        revision: i64,
        #[arg(long)]
        name: Option<String>,
        states: Vec<PropState>,
    },
    /// Print what an act asks for: key, state and path of each prop, and whether it is registered no longer.
    Resolve { stage: i32, act: i32 },
}

/// `PROP=STATE`.
#[derive(Debug, Clone, Copy)]
pub struct PropState {
    prop: i32,
    state: i32,
}

impl FromStr for PropState {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = text.split_once('=').and_then(|(prop, state)| {
            Some(Self { prop: prop.parse().ok().filter(|prop| *prop > 0)?, state: state.parse().ok()? })
        });
        parsed.ok_or("must read PROP=STATE, such as 1=2")
    }
}

pub async fn converse(client: &Client, verb: Verb, json: bool) -> Result<(), Failure> {
    let nothing = &NoParameters {};
    match verb {
        Verb::Allocate { request_id } => {
            let request_id = request_id.unwrap_or_else(Uuid::new_v4);
            let context = Context { named: Some(request_id.to_string().into()), ..Default::default() };
            let given = client.call_with::<AllocateStage>(&(), &NewStage::default(), &context).await?;
            show(json, &given, || print(given.stage_id))
        }
        Verb::Info { stage } => {
            let stage = client.stage_info(&name(stage)?, nothing).await?;
            show(json, &stage, || {
                print_row("stage", &stage.stage_id)?;
                print_row("request id", &stage.request_id)?;
                print_row("allocated", &screen::moment(stage.allocated_at))?;
                print_row("props", &stage.props)?;
                print_row("acts", &stage.acts)
            })
        }
        Verb::Register { stage, path } => {
            show_prop(json, &client.register_prop(&name(stage)?, &NewProp { path }).await?)
        }
        Verb::Unregister { stage, prop } => {
            show_prop(json, &client.unregister_prop(&name(stage)?, &PropId { id: prop }).await?)
        }
        Verb::Props { stage } => {
            let props = all_props(client, &name(stage)?).await?;
            show(json, &props, || screen::Table::of(["prop", "path"], &props, prop_cells))
        }
        Verb::Prop { stage, id_or_path } => {
            let one = match id_or_path.parse() {
                Ok(id) => OneProp { id: Some(id), path: None },
                Err(_) => OneProp { id: None, path: Some(id_or_path) },
            };
            show_prop(json, &client.get_prop(&name(stage)?, &one).await?)
        }
        Verb::Acts { stage } => {
            let acts = client.list_acts(&name(stage)?, nothing).await?.acts;
            show(json, &acts, || {
                screen::Table::of(["act", "revision", "name"], &acts, |act| {
                    let name = act.name.clone().unwrap_or_default();
                    vec![act.key.to_string(), format!("revision {}", act.revision), name]
                })
            })
        }
        Verb::Act { stage, act } => show_act(json, &client.get_act(&name(stage)?, &ActId { id: act }).await?),
        Verb::CreateAct { stage, name: act_name, states } => {
            let act = NewAct { name: act_name, target_prop_states: keyed(stage, &states)?, revision: None };
            show_act(json, &client.create_act(&name(stage)?, &act).await?)
        }
        Verb::UpdateAct { stage, act, revision, name: act_name, states } => {
            let change = ChangedAct { id: act, name: act_name, target_prop_states: keyed(stage, &states)?, revision };
            show_act(json, &client.update_act(&name(stage)?, &change).await?)
        }
        Verb::Resolve { stage, act } => {
            let resolved = client.resolve_act(&name(stage)?, &ActId { id: act }).await?;
            show(json, &resolved, || {
                screen::Table::of(["prop", "state", "path"], &resolved.props, |prop| {
                    let mut cells = vec![prop.key.to_string(), prop.state.to_string(), prop.path.clone()];
                    cells.extend((!prop.registered).then(|| "not registered any more".to_owned()));
                    cells
                })
            })
        }
    }
}

async fn all_props(client: &Client, stage: &Name) -> Result<Vec<Prop>, Failure> {
    let mut all = Vec::new();
    let mut after = 0;
    loop {
        let filter = PropFilter { path: None, after, limit: Some(MOST_LISTED as i64) };
        let Props::Page { props, next } = client.list_props(stage, &filter).await? else {
            return Err(Failure("the answer is no list".into()));
        };
        all.extend(props);
        match next {
            Some(next) => after = next,
            None => return Ok(all),
        }
    }
}

fn name(stage: i32) -> Result<Name, Failure> {
    Ok(stage.to_string().parse()?)
}

fn keyed(stage: i32, states: &[PropState]) -> Result<TargetPropStates, Failure> {
    let mut keyed = TargetPropStates::new();
    for PropState { prop, state } in states {
        if keyed.insert(Key::of_prop(stage, *prop), *state).is_some() {
            return Err(Failure(format!("prop {prop} is given two states")));
        }
    }
    Ok(keyed)
}

fn show_prop(json: bool, prop: &Prop) -> Result<(), Failure> {
    show(json, prop, || screen::Table::of(["prop", "path"], [prop], prop_cells))
}

fn prop_cells(prop: &Prop) -> Vec<String> {
    vec![prop.key.to_string(), prop.path.clone()]
}

fn show_act(json: bool, act: &Act) -> Result<(), Failure> {
    show(json, act, || {
        print_row("act", &act.key)?;
        if let Some(name) = &act.name {
            print_row("name", name)?;
        }
        print_row("revision", &act.revision)?;
        act.target_prop_states.iter().try_for_each(|(key, state)| print_row(&key.to_string(), state))
    })
}
