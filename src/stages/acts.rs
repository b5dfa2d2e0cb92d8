//! Acts: the states that props of a stage shall take.

use super::{
    Edit, Key, Stages,
    contents::{self, Contents},
};
use crate::{
    api::{
        Call, Handle,
        stages::{
            Act, ActSummary, Acts, CreateAct, GetAct, ListActs, ResolveAct, ResolvedAct, ResolvedProp, UpdateAct,
        },
    },
    error::{Error, Result},
};

impl Handle<CreateAct> for Stages {
    async fn handle(&self, call: Call<CreateAct>) -> Result<Act> {
        let wanted = call.request.clone();
        if wanted.revision.is_some_and(|revision| revision != 0) {
            return Err(Error::field("revision", "a new act has none"));
        }
        let create = move |contents: &mut Contents| {
            let id = contents.create_act(wanted.name.as_deref(), &wanted.target_prop_states)?;
            Ok(Edit { answer: describe(contents.stage(), id, contents.act(id)?), is_news: true })
        };
        Ok(self.change(&call, "act-created", create).await?.answer)
    }
}

impl Handle<UpdateAct> for Stages {
    async fn handle(&self, call: Call<UpdateAct>) -> Result<Act> {
        let wanted = call.request.clone();
        let update = move |contents: &mut Contents| {
            contents.update_act(wanted.id, wanted.revision, wanted.name.as_deref(), &wanted.target_prop_states)?;
            Ok(Edit { answer: describe(contents.stage(), wanted.id, contents.act(wanted.id)?), is_news: true })
        };
        Ok(self.change(&call, "act-updated", update).await?.answer)
    }
}

impl Handle<GetAct> for Stages {
    async fn handle(&self, call: Call<GetAct>) -> Result<Act> {
        let id = call.request.id;
        let get = move |contents: &mut Contents| Ok(describe(contents.stage(), id, contents.act(id)?));
        self.look(&call.target, get).await
    }
}

impl Handle<ListActs> for Stages {
    async fn handle(&self, call: Call<ListActs>) -> Result<Acts> {
        let list = |contents: &mut Contents| {
            let summary = |(id, act): (i32, &contents::Act)| ActSummary {
                key: Key::of_act(contents.stage(), id),
                act_id: id,
                name: act.name.clone(),
                revision: act.revision,
            };
            Ok(Acts { acts: contents.acts().map(summary).collect() })
        };
        self.look(&call.target, list).await
    }
}

impl Handle<ResolveAct> for Stages {
    async fn handle(&self, call: Call<ResolveAct>) -> Result<ResolvedAct> {
        let id = call.request.id;
        let resolve = move |contents: &mut Contents| {
            let stage = contents.stage();
            let resolved = |(id, prop, state): (i32, &contents::Prop, i32)| ResolvedProp {
                key: Key::of_prop(stage, id),
                path: prop.path.clone(),
                state,
                registered: prop.registered,
            };
            Ok(ResolvedAct { props: contents.resolve(id)?.into_iter().map(resolved).collect() })
        };
        self.look(&call.target, resolve).await
    }
}

fn describe(stage: i32, id: i32, act: &contents::Act) -> Act {
    Act {
        key: Key::of_act(stage, id),
        act_id: id,
        name: act.name.clone(),
        target_prop_states: act.states.iter().map(|(prop, state)| (Key::of_prop(stage, *prop), *state)).collect(),
        revision: act.revision,
    }
}
