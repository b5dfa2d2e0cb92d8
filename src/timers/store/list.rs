//! Pages of timers.

use chrono::{DateTime, Utc};
use sqlx::{Postgres, QueryBuilder, Row, postgres::PgRow};
use uuid::Uuid;

use super::{Store, parsed, unavailable};
use crate::{
    api::{
        Name,
        timers::{Id, Order, Sort, Status, TimerSummary},
    },
    error::Result,
};

/// Which timers, in which order, from where.
pub struct Page<'a> {
    pub tenant: &'a Name,
    pub status: Option<Status>,
    pub metadata: &'a std::collections::BTreeMap<String, String>,
    pub sort: Sort,
    pub order: Order,
    pub limit: i64,
    pub offset: i64,
    /// Behind this one.
    pub after: Option<(DateTime<Utc>, Uuid)>,
}

impl Store {
    /// A page, and how many timers there are on all of them.
    pub async fn list(&self, page: &Page<'_>) -> Result<(Vec<TimerSummary>, i64)> {
        let mut count = QueryBuilder::new("select count(*) from timers where ");
        filter(&mut count, page);
        let total: i64 = count.build_query_scalar().fetch_one(&self.pool).await.map_err(unavailable)?;

        let mut query = QueryBuilder::new(SUMMARIES);
        filter(&mut query, page);
        let (direction, comparison) = match page.order {
            Order::Asc => ("asc", ">"),
            Order::Desc => ("desc", "<"),
        };
        // An id carries the moment of its creation, so the order of ids is the order of creation.
        match (page.sort, page.after) {
            (Sort::CreatedAt, Some((_, id))) => {
                query.push(" and id ").push(comparison).push(" ").push_bind(id);
            }
            (Sort::ExecuteAt, Some((moment, id))) => {
                query.push(" and (execute_at, id) ").push(comparison).push(" (").push_bind(moment).push(", ");
                query.push_bind(id).push(")");
            }
            (_, None) => {}
        }
        let order = match page.sort {
            Sort::CreatedAt => format!(" order by id {direction}"),
            Sort::ExecuteAt => format!(" order by execute_at {direction}, id {direction}"),
        };
        query.push(order).push(" limit ").push_bind(page.limit).push(" offset ").push_bind(page.offset);
        let rows = query.build().fetch_all(&self.pool).await.map_err(unavailable)?;
        let timers: Result<Vec<_>, _> = rows.iter().map(summary).collect();
        Ok((timers.map_err(unavailable)?, total))
    }
}

/// What a list shows, and no more: payloads may be large.
const SUMMARIES: &str = "select id, created_at, updated_at, execute_at, callback_type, status, executed_at, late_by_ms \
     from timers where ";

fn summary(row: &PgRow) -> Result<TimerSummary, sqlx::Error> {
    Ok(TimerSummary {
        id: Id(row.try_get("id")?),
        created_at: row.try_get("created_at")?,
        updated_at: row.try_get("updated_at")?,
        execute_at: row.try_get("execute_at")?,
        callback_type: parsed(row, "callback_type")?,
        status: parsed(row, "status")?,
        executed_at: row.try_get("executed_at")?,
        late_by_ms: row.try_get("late_by_ms")?,
        repeated: false,
    })
}

fn filter(query: &mut QueryBuilder<Postgres>, page: &Page<'_>) {
    query.push("tenant = ").push_bind(page.tenant.as_str().to_owned());
    if let Some(status) = page.status {
        query.push(" and status = ").push_bind(status.as_str());
    }
    for (member, text) in page.metadata {
        query.push(" and metadata ->> ").push_bind(member.clone()).push(" = ").push_bind(text.clone());
    }
}
