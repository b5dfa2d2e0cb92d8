//! What is inside a stage: its props and acts, and the rules for them. Nothing here knows where it is kept.
//!
//! The state's own value has only the counters; each prop and each act stands in a part beside it, and is written when it
//! changes.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::Key;
use crate::{
    api::stages::TargetPropStates,
    error::{Code, Error, Result},
    watermark::{Older, Parts, State},
};

/// What a stage may have had over time, so that a process can hold it and read it in a moment.
const MOST_PROPS: i32 = 20_000;
const MOST_ACTS: i32 = 2_000;

/// States of one act, and of all acts of a stage.
const MOST_STATES: usize = 2_000;
const MOST_STATES_OF_ALL: usize = 200_000;

/// Edits of others that are read one by one. If there are more, everything is read again, side by side.
const FEW: u64 = 50;

const MOST_PATH: usize = 1024;
const MOST_NAME: usize = 255;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Contents {
    stage: i32,
    /// Goes up with each change, so that two states of a stage are the same if this is.
    edits: u64,
    last_prop: i32,
    last_act: i32,
    #[serde(skip)]
    inside: Arc<Inside>,
    /// What was changed since the last write.
    #[serde(skip)]
    changed: BTreeSet<Part>,
}

#[derive(Debug, Clone, Default)]
struct Inside {
    props: BTreeMap<i32, Arc<Prop>>,
    acts: BTreeMap<i32, Arc<Act>>,
    /// The registered ones, by their path in small letters.
    by_path: HashMap<Arc<str>, i32>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Prop {
    pub path: String,
    /// False once it is unregistered: acts may still name it.
    pub registered: bool,
    /// Which of the stage's edits made it so.
    edit: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Act {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// By prop id.
    pub states: BTreeMap<i32, i32>,
    pub revision: i64,
    edit: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Prop(i32),
    Act(i32),
}

impl Contents {
    pub fn of(stage: i32) -> Self {
        Self { stage, edits: 0, last_prop: 0, last_act: 0, inside: Arc::default(), changed: BTreeSet::new() }
    }

    /// Passes over ids that may have been given without our knowing: as many, but no more than a tenth of what a stage may have.
    /// `parts` are those that are there, whatever the counters say.
    pub fn jumped<'a>(mut self, margin: i64, parts: impl Iterator<Item = &'a str>) -> Self {
        for (kind, id) in parts.filter_map(|name| name.split_once('.')) {
            let id: i32 = id.parse().unwrap_or_default();
            match kind {
                "prop" => self.last_prop = self.last_prop.max(id),
                _ => self.last_act = self.last_act.max(id),
            }
        }
        let jump = |last: i32, most: i32| (last + margin.min(i64::from(most / 10)) as i32).min(most);
        self.last_prop = jump(self.last_prop, MOST_PROPS);
        self.last_act = jump(self.last_act, MOST_ACTS);
        self
    }

    pub fn stage(&self) -> i32 {
        self.stage
    }

    /// The registered props in the order of their ids.
    pub fn props(&self) -> impl Iterator<Item = (i32, &Prop)> {
        self.inside.props.iter().map(|(id, prop)| (*id, &**prop)).filter(|(_, prop)| prop.registered)
    }

    pub fn acts(&self) -> impl Iterator<Item = (i32, &Act)> {
        self.inside.acts.iter().map(|(id, act)| (*id, &**act))
    }

    /// A registered prop.
    pub fn prop(&self, id: i32) -> Result<&Prop> {
        let prop = self.inside.props.get(&id).filter(|prop| prop.registered);
        prop.map(|prop| &**prop)
            .ok_or_else(|| not_found(format!("no prop {} is registered", Key::of_prop(self.stage, id))))
    }

    pub fn prop_by_path(&self, path: &str) -> Result<(i32, &Prop)> {
        let id = self.inside.by_path.get(&*path.to_ascii_lowercase());
        let id = *id.ok_or_else(|| not_found(format!("no prop with this path is registered: {path}")))?;
        Ok((id, self.prop(id)?))
    }

    pub fn act(&self, id: i32) -> Result<&Act> {
        let act = self.inside.acts.get(&id);
        act.map(|act| &**act).ok_or_else(|| not_found(format!("there is no act {}", Key::of_act(self.stage, id))))
    }

    /// Registers a path, unless it is. Tells the prop's id, and whether it was there before.
    pub fn register(&mut self, path: &str) -> Result<(i32, bool)> {
        check_path(path)?;
        let folded = path.to_ascii_lowercase();
        if let Some(id) = self.inside.by_path.get(&*folded) {
            return Ok((*id, true));
        }
        let id = next(self.last_prop, MOST_PROPS, "props")?;
        self.last_prop = id;
        let (inside, edit) = self.edit(Part::Prop(id));
        inside.by_path.insert(folded.into(), id);
        inside.props.insert(id, Arc::new(Prop { path: path.to_owned(), registered: true, edit }));
        Ok((id, false))
    }

    /// Unregisters a prop. Its id stays taken.
    pub fn unregister(&mut self, id: i32) -> Result<Prop> {
        let prop = self.prop(id)?.clone();
        let (inside, edit) = self.edit(Part::Prop(id));
        inside.by_path.remove(&*prop.path.to_ascii_lowercase());
        inside.props.insert(id, Arc::new(Prop { registered: false, edit, ..prop.clone() }));
        Ok(prop)
    }

    pub fn create_act(&mut self, name: Option<&str>, states: &TargetPropStates) -> Result<i32> {
        let id = next(self.last_act, MOST_ACTS, "acts")?;
        check_name(name)?;
        let states = self.states(id, states)?;
        self.last_act = id;
        let (inside, edit) = self.edit(Part::Act(id));
        inside.acts.insert(id, Arc::new(Act { name: name.map(str::to_owned), states, revision: 1, edit }));
        Ok(id)
    }

    /// Changes an act that is still as the editor has read it.
    pub fn update_act(&mut self, id: i32, read: i64, name: Option<&str>, states: &TargetPropStates) -> Result<()> {
        let Act { name: old_name, revision, .. } = self.act(id)?.clone();
        if read != revision {
            let key = Key::of_act(self.stage, id);
            let text = format!("revision: act {key} is at revision {revision}, not {read}; read it again");
            return Err(Error::new(Code::Conflict, text).details(serde_json::json!({
                "field": "revision", "revision": revision,
            })));
        }
        check_name(name)?;
        let states = self.states(id, states)?;
        let name = name.map(str::to_owned).or(old_name);
        let (inside, edit) = self.edit(Part::Act(id));
        inside.acts.insert(id, Arc::new(Act { name, states, revision: revision + 1, edit }));
        Ok(())
    }

    /// What an act asks for: prop id, prop, state.
    pub fn resolve(&self, act: i32) -> Result<Vec<(i32, &Prop, i32)>> {
        let states = self.act(act)?.states.iter();
        states
            .map(|(id, state)| {
                let prop = self.inside.props.get(id);
                let prop =
                    prop.ok_or_else(|| Error::internal(format!("act {act} names prop {id}, which is missing")))?;
                Ok((*id, &**prop, *state))
            })
            .collect()
    }

    /// The states of an act by prop id, if every prop is one of this stage and registered.
    fn states(&self, act: i32, wanted: &TargetPropStates) -> Result<BTreeMap<i32, i32>> {
        const FIELD: &str = "target_prop_states";
        if wanted.len() > MOST_STATES {
            return Err(Error::field(FIELD, format!("an act has at most {MOST_STATES} of them, not {}", wanted.len())));
        }
        let others = self.acts().filter(|(id, _)| *id != act).map(|(_, other)| other.states.len());
        if others.sum::<usize>() + wanted.len() > MOST_STATES_OF_ALL {
            return Err(Error::field(FIELD, format!("all acts of a stage together have at most {MOST_STATES_OF_ALL}")));
        }
        let act = Key::of_act(self.stage, act);
        wanted
            .iter()
            .map(|(key, state)| match *key {
                Key { act: 1.., .. } => Err(Error::field(FIELD, format!("{key} names an act, not a prop"))),
                Key { stage, prop, .. } if stage == self.stage && self.prop(prop).is_ok() => Ok((prop, *state)),
                _ => {
                    let text = format!("Data Error: Act '{act}' references an unregistered PropID '{key}'.");
                    Err(Error::invalid(text).about(FIELD))
                }
            })
            .collect()
    }

    /// What is to be edited, and the number of the edit.
    fn edit(&mut self, part: Part) -> (&mut Inside, u64) {
        self.edits += 1;
        self.changed.insert(part);
        (Arc::make_mut(&mut self.inside), self.edits)
    }
}

impl PartialEq for Contents {
    fn eq(&self, other: &Self) -> bool {
        self.edits == other.edits
    }
}

impl State for Contents {
    async fn complete(&mut self, older: Option<Older<'_, Self>>, parts: Parts<'_>) -> Result<()> {
        let (mut inside, parts) = match older {
            Some(older) if *self == *older.state => {
                self.inside = older.state.inside.clone();
                return Ok(());
            }
            Some(older) if self.edits.abs_diff(older.state.edits) <= FEW => {
                (Inside::clone(&older.state.inside), parts.written_after(older.revision).await?)
            }
            _ => (Inside::default(), parts.all().await?),
        };
        let mut newest = 0;
        for (name, value) in parts {
            let edit = inside.put(&name, &value);
            newest = newest.max(edit.map_err(|problem| Error::internal(format!("{name} is broken: {problem}")))?);
        }
        // A server that lags behind knows the stage, but not yet what the last edit has made.
        if newest < self.edits {
            return Err(Error::unavailable("the last edit of the stage could not be read"));
        }
        self.inside = Arc::new(inside);
        Ok(())
    }

    fn take_new_parts(&mut self) -> Vec<(String, Bytes)> {
        let part = |part| {
            let (name, value) = match part {
                Part::Prop(id) => (format!("prop.{id}"), serde_json::to_vec(&self.inside.props[&id])),
                Part::Act(id) => (format!("act.{id}"), serde_json::to_vec(&self.inside.acts[&id])),
            };
            (name, value.expect("numbers and text are JSON").into())
        };
        std::mem::take(&mut self.changed).into_iter().map(part).collect()
    }
}

impl Inside {
    /// Takes in a part as it was read, and tells the edit that made it.
    fn put(&mut self, name: &str, value: &[u8]) -> Result<u64, String> {
        let (kind, id) = name.split_once('.').ok_or("its name has no id")?;
        let id: i32 = id.parse().map_err(|_| "its id is no number")?;
        let broken = |error: serde_json::Error| error.to_string();
        match kind {
            "prop" => {
                let prop: Prop = serde_json::from_slice(value).map_err(broken)?;
                let (path, edit) = (prop.path.to_ascii_lowercase(), prop.edit);
                if prop.registered {
                    self.by_path.insert(path.into(), id);
                } else if self.by_path.get(&*path) == Some(&id) {
                    self.by_path.remove(&*path);
                }
                self.props.insert(id, Arc::new(prop));
                Ok(edit)
            }
            "act" => {
                let act: Act = serde_json::from_slice(value).map_err(broken)?;
                let edit = act.edit;
                self.acts.insert(id, Arc::new(act));
                Ok(edit)
            }
            _ => Err("nothing of this kind is known".into()),
        }
    }
}

fn next(last: i32, most: i32, what: &str) -> Result<i32> {
    if last < most {
        Ok(last + 1)
    } else {
        Err(Error::new(Code::Exhausted, format!("a stage can have {most} {what} over time, and this one had them")))
    }
}

fn check_path(path: &str) -> Result<()> {
    let problem = match path.chars().count() {
        0 => "must not be empty".into(),
        length if length > MOST_PATH => format!("must not have more than {MOST_PATH} characters, has {length}"),
        _ if !path.starts_with('/') => {
            "must be the path of an object, such as /Game/Maps/MyLevel.MyLevel:PersistentLevel.BP_Door_42".into()
        }
        _ if path.chars().any(char::is_control) || path.trim() != path => {
            "must not have control characters, or blanks at its end".into()
        }
        _ => return Ok(()),
    };
    Err(Error::field("path", problem))
}

fn check_name(name: Option<&str>) -> Result<()> {
    match name.map(|name| name.chars().count()) {
        Some(length) if !(1..=MOST_NAME).contains(&length) => {
            Err(Error::field("name", format!("must have 1 to {MOST_NAME} characters, has {length}")))
        }
        _ => Ok(()),
    }
}

fn not_found(text: String) -> Error {
    Error::new(Code::NotFound, text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn states(stage: i32, props: impl IntoIterator<Item = i32>) -> TargetPropStates {
        props.into_iter().map(|prop| (Key::of_prop(stage, prop), 1)).collect()
    }

    #[test]
    fn a_stage_has_bounds() {
        let mut contents = Contents::of(7);
        for prop in 1..=MOST_PROPS {
            assert_eq!(contents.register(&format!("/Game/{prop}")).unwrap(), (prop, false));
        }
        contents.unregister(1).unwrap();
        assert_eq!(contents.register("/Game/more").unwrap_err().code, Code::Exhausted, "no id comes again");
        assert_eq!(contents.register("/GAME/2").unwrap(), (2, true));
        let most = states(7, 2..2 + MOST_STATES as i32);
        let one_more = states(7, 2..3 + MOST_STATES as i32);
        assert!(contents.create_act(None, &one_more).unwrap_err().message.contains("at most 2000"));
        for act in 1..=MOST_STATES_OF_ALL / MOST_STATES {
            assert_eq!(contents.create_act(None, &most).unwrap(), act as i32);
        }
        let full = contents.create_act(None, &states(7, [2])).unwrap_err();
        assert!(full.message.contains("at most 200000"), "{full}");
        contents.update_act(1, 1, None, &most).unwrap();
        contents.update_act(1, 2, None, &states(7, [])).unwrap();
        contents.create_act(None, &states(7, [2])).unwrap();
        while contents.last_act < MOST_ACTS {
            contents.create_act(None, &states(7, [])).unwrap();
        }
        assert_eq!(contents.create_act(None, &states(7, [])).unwrap_err().code, Code::Exhausted);
    }

    proptest! {
        /// Whatever was done, the parts in any order say all of it.
        #[test]
        fn the_parts_tell_everything(
            steps in prop::collection::vec((0_u8..4, 1_i32..6, 1_usize..4), 1..40),
            backwards: bool,
        ) {
            let mut contents = Contents::of(7);
            let mut stored = BTreeMap::new();
            for (what, number, until_write) in steps {
                // What is refused changes nothing, and is not told apart here.
                let _ = match what {
                    0 | 1 => contents.register(&format!("/Game/{number}")).map(drop),
                    2 => contents.unregister(number).map(drop),
                    _ => match contents.act(1).map(|act| act.revision) {
                        Ok(revision) => contents.update_act(1, revision, Some("a"), &states(7, [number])),
                        Err(_) => contents.create_act(None, &states(7, [number])).map(drop),
                    },
                };
                if until_write == 1 {
                    stored.extend(contents.take_new_parts());
                }
            }
            stored.extend(contents.take_new_parts());
            let mut parts: Vec<_> = stored.into_iter().collect();
            if backwards {
                parts.reverse();
            }
            let mut read = Inside::default();
            let mut newest = 0;
            for (name, value) in parts {
                newest = newest.max(read.put(&name, &value).unwrap());
            }
            prop_assert_eq!(newest, contents.edits);
            prop_assert_eq!(format!("{:?}", read.props), format!("{:?}", contents.inside.props));
            prop_assert_eq!(format!("{:?}", read.acts), format!("{:?}", contents.inside.acts));
            prop_assert_eq!(read.by_path, contents.inside.by_path.clone());
        }
    }
}
