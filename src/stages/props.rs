//! Props: the registry of a stage.

use super::{
    Edit, Key, Stages,
    contents::{self, Contents},
};
use crate::{
    api::{
        Call, Handle,
        stages::{GetProp, ListProps, MOST_LISTED, OneProp, Prop, PropFilter, Props, RegisterProp, UnregisterProp},
    },
    error::{Error, Result},
};

impl Handle<RegisterProp> for Stages {
    async fn handle(&self, call: Call<RegisterProp>) -> Result<Prop> {
        let path = call.request.path.clone();
        let register = move |contents: &mut Contents| {
            let (id, was_there) = contents.register(&path)?;
            Ok(Edit { answer: describe(contents.stage(), id, contents.prop(id)?), is_news: !was_there })
        };
        let Edit { answer, is_news } = self.change(&call, "prop-registered", register).await?;
        Ok(Prop { repeated: !is_news, ..answer })
    }
}

impl Handle<ListProps> for Stages {
    async fn handle(&self, call: Call<ListProps>) -> Result<Props> {
        let PropFilter { path, after, limit } = call.request;
        if let Some(path) = path {
            return self.find_prop(&call.target, path).await.map(Props::One);
        }
        let limit = limit.unwrap_or(MOST_LISTED as i64);
        if !(1..=MOST_LISTED as i64).contains(&limit) {
            return Err(Error::field("limit", format!("must lie between 1 and {MOST_LISTED}, is {limit}")));
        }
        let page = move |contents: &mut Contents| {
            let mut behind = contents.props().skip_while(|(id, _)| *id <= after);
            let page = behind.by_ref().take(limit as usize);
            let props: Vec<Prop> = page.map(|(id, prop)| describe(contents.stage(), id, prop)).collect();
            let next = behind.next().and(props.last().map(|prop| prop.prop_id));
            Ok(Props::Page { props, next })
        };
        self.look(&call.target, page).await
    }
}

impl Handle<GetProp> for Stages {
    async fn handle(&self, call: Call<GetProp>) -> Result<Prop> {
        match call.request {
            OneProp { id: Some(id), path: None } => {
                let get = move |contents: &mut Contents| Ok(describe(contents.stage(), id, contents.prop(id)?));
                self.look(&call.target, get).await
            }
            OneProp { id: None, path: Some(path) } => self.find_prop(&call.target, path).await,
            _ => Err(Error::field("id", "name a prop by its id or by its path, one of them")),
        }
    }
}

impl Handle<UnregisterProp> for Stages {
    async fn handle(&self, call: Call<UnregisterProp>) -> Result<Prop> {
        let id = call.request.id;
        let unregister = move |contents: &mut Contents| {
            let prop = contents.unregister(id)?;
            Ok(Edit { answer: describe(contents.stage(), id, &prop), is_news: true })
        };
        Ok(self.change(&call, "prop-unregistered", unregister).await?.answer)
    }
}

impl Stages {
    async fn find_prop(&self, stage: &crate::api::Name, path: String) -> Result<Prop> {
        let find = move |contents: &mut Contents| {
            let (id, prop) = contents.prop_by_path(&path)?;
            Ok(describe(contents.stage(), id, prop))
        };
        self.look(stage, find).await
    }
}

fn describe(stage: i32, id: i32, prop: &contents::Prop) -> Prop {
    Prop { key: Key::of_prop(stage, id), prop_id: id, path: prop.path.clone(), repeated: false }
}
