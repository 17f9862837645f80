/* SPDX-License-Identifier: Apache-2.0 */
/* The part of an agent that meets others, by metadata that it is given. Programs include nixl.h. */
#ifndef SLUICE_NIXL_MEETING_H
#define SLUICE_NIXL_MEETING_H

#include "sluice_memory.h"

namespace sluice_nixl
{

class meeting_part : public memory_part
{
protected:
	using clock = std::chrono::steady_clock;

	/* Another agent. */
	struct met {
		sluice_peer peer = 0;
		sluice_peer former = 0; /* its transfers may be asked for still how they failed */
		places where;
		std::string description;
		clock::time_point retry{}; /* when it may be connected anew */
	};
	using met_ptr = std::shared_ptr<met>;

	/* Keeps what comes of one agent, by ports too, in order: the lock is let go to connect. */
	class turn
	{
	public:
		turn(meeting_part &of, lock &held, const std::string &agent)
			: of_(of), held_(held), agent_(agent)
		{
			of.turns_cv_.wait(held, [&] { return !of.turns_.count(agent); });
			of.turns_.insert(agent);
		}
		turn(const turn &) = delete;
		turn &operator=(const turn &) = delete;
		~turn()
		{
			if (!held_.owns_lock())
				held_.lock();
			of_.turns_.erase(agent_);
			of_.turns_cv_.notify_all();
		}

	private:
		meeting_part &of_;
		lock &held_;
		const std::string agent_;
	};

	using memory_part::memory_part;

public:
	status load_md(const nixl_blob_t &blob, std::string &agent)
	{
		metadata m;
		if (!decode(blob, m))
			return no(NIXL_ERR_MISMATCH, "loadRemoteMD",
				  "this is no metadata of such an agent, or it is cut or altered");
		lock held(mu_);
		if (m.agent == name_)
			return no(NIXL_ERR_INVALID_PARAM, "loadRemoteMD",
				  "this is our own metadata");
		turn mine(*this, held, m.agent);
		status s = open({});
		if (s != NIXL_SUCCESS)
			return s;
		auto told = std::make_shared<const std::string>(std::move(m.description));
		met_ptr known = find(m.agent), other = known;
		if (!known || is_lost(known->peer) ||
		    sluice_peer_refresh(known->peer, told->data(), told->size()) != SLUICE_OK) {
			other = std::make_shared<met>();
			held.unlock();
			int code = sluice_connect(engine_, told->data(), told->size(), 120 * second,
						  &other->peer);
			held.lock();
			if (code < 0)
				return ended("loadRemoteMD", code);
		}
		for (const range_ptr &r : m.ranges) {
			int code = sluice_remote_find(other->peer, r->name().c_str(), &r->handle);
			if (code < 0 && other != known)
				(void)sluice_peer_close(other->peer);
			if (code < 0)
				return ended("loadRemoteMD", code);
			r->told = told;
		}
		if (m.whole)
			other->where.keep_only(m.ranges);
		for (const range_ptr &r : m.ranges)
			other->where.learn(r);
		other->description = *told;
		if (known && other != known)
			close(*known);
		met_[m.agent] = other;
		agent = m.agent;
		return NIXL_SUCCESS;
	}
	status forget(const std::string &agent)
	{
		lock held(mu_);
		met_ptr known = find(agent);
		if (!known)
			return NIXL_ERR_NOT_FOUND;
		met_.erase(agent);
		close(*known);
		return NIXL_SUCCESS;
	}
	status check_md(const std::string &agent, const nixl_xfer_dlist_t &descs) const
	{
		lock held(mu_);
		met_ptr known = find(agent);
		if (!known || is_lost(known->peer))
			return NIXL_ERR_NOT_FOUND;
		pieces found;
		std::string why;
		return known->where.locate(descs, found, why) ? NIXL_SUCCESS : NIXL_ERR_NOT_FOUND;
	}
	status make_connection(const std::string &agent)
	{
		lock held(mu_);
		met_ptr known;
		return live(held, "makeConnection", agent, known);
	}

protected:
	static bool is_lost(sluice_peer peer)
	{
		int lost = 1;
		return sluice_peer_lost(peer, &lost) < 0 || lost;
	}
	met_ptr find(const std::string &agent) const
	{
		auto at = met_.find(agent);
		return at == met_.end() ? nullptr : at->second;
	}
	static void close(met &m)
	{
		(void)sluice_peer_close(m.peer);
		if (m.former)
			(void)sluice_peer_close(m.former);
	}
	/* An agent, connected anew where it was lost and lives. Held is let go while that lasts. */
	status live(lock &held, const char *call, const std::string &agent, met_ptr &out)
	{
		out = find(agent);
		if (!out)
			return no(NIXL_ERR_NOT_FOUND, call, "the metadata of " + agent +
								    " is not loaded");
		if (!is_lost(out->peer))
			return NIXL_SUCCESS;
		if (clock::now() < out->retry)
			return NIXL_ERR_REMOTE_DISCONNECT; /* it was said why */
		out->retry = clock::now() + std::chrono::seconds(5);
		std::string told = out->description;
		sluice_peer peer;
		held.unlock();
		int code = sluice_connect(engine_, told.data(), told.size(), second, &peer);
		held.lock();
		if (code < 0)
			return no(NIXL_ERR_REMOTE_DISCONNECT, call,
				  agent + " is lost, and not connected anew: " + sluice_error());
		if (find(agent) != out || !is_lost(out->peer)) { /* met anew meanwhile */
			(void)sluice_peer_close(peer);
			return (out = find(agent)) ? NIXL_SUCCESS : NIXL_ERR_NOT_FOUND;
		}
		return renew(call, *out, peer);
	}
	/* Lists that were prepared refer to the ranges, and serve on. */
	status renew(const char *call, met &m, sluice_peer peer)
	{
		const std::string *told = nullptr;
		std::vector<std::pair<range_ptr, sluice_remote>> found;
		for (const range_ptr &r : m.where.all()) {
			sluice_remote handle = 0;
			int code = SLUICE_OK;
			if (r->told.get() != told)
				code = sluice_peer_refresh(peer, r->told->data(), r->told->size());
			told = r->told.get();
			if (code >= 0)
				code = sluice_remote_find(peer, r->name().c_str(), &handle);
			if (code < 0) {
				(void)sluice_peer_close(peer);
				return ended(call, code);
			}
			found.emplace_back(r, handle);
		}
		for (auto &f : found)
			f.first->handle = f.second;
		if (m.former)
			(void)sluice_peer_close(m.former);
		m.former = m.peer, m.peer = peer, m.retry = {};
		return NIXL_SUCCESS;
	}
	status peer_of(lock &held, const char *call, const std::string &agent, sluice_peer &out)
	{
		met_ptr known;
		status s = NIXL_SUCCESS;
		if (agent == name_) {
			s = open({});
			return s == NIXL_SUCCESS
				       ? ended(call, sluice_self(engine_, &out))
				       : s;
		}
		s = live(held, call, agent, known);
		if (s == NIXL_SUCCESS)
			out = known->peer;
		return s;
	}

	std::unordered_map<std::string, met_ptr> met_;
	std::condition_variable turns_cv_;
	std::set<std::string> turns_; /* the agents whose metadata is being taken */
};

} // namespace sluice_nixl

#endif
