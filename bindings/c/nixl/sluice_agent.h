/* SPDX-License-Identifier: Apache-2.0 */
/* The part of an agent that moves bytes and sends messages. Programs include nixl.h. */
#ifndef SLUICE_NIXL_AGENT_H
#define SLUICE_NIXL_AGENT_H

#include <locale>
#include <sstream>

#include "sluice_ports.h"

/* A prepared list: agent "" is the local side. */
class nixlDlistH
{
public:
	std::string agent;
	sluice_nixl::pieces at;
};

class nixlXferReqH
{
public:
	nixl_xfer_op_t op;
	std::string agent;
	sluice_nixl::pieces local, remote;
	nixlBackendH *backend;
	std::optional<nixl_blob_t> message;
	sluice_transfer t = 0;
	sluice_peer peer = 0;
	std::vector<sluice_nixl::pattern> kept; /* lists that the transfer refers to */
	bool posted = false;
	nixl_status_t gone = NIXL_SUCCESS; /* why the last post did not begin */
	nixl_xfer_telem_t times{};
	bool ended = false;
};

class nixlAgentData : public sluice_nixl::ports_part
{
	using pieces = sluice_nixl::pieces;

public:
	nixlAgentData(const std::string &name, const nixlAgentConfig &config)
		: ports_part(name, config), timed_(captures(config.captureTelemetry))
	{
	}

	status prep(const std::string &agent, const nixl_xfer_dlist_t &descs, nixlDlistH *&out)
	{
		lock held(mu_);
		auto made = std::make_unique<nixlDlistH>();
		made->agent = agent;
		status s = locate("prepXferDlist", agent, descs, made->at);
		if (s != NIXL_SUCCESS)
			return s;
		out = made.get();
		lists_.emplace(out, std::move(made));
		return NIXL_SUCCESS;
	}
	struct indices {
		const int *list;
		size_t count;
	};
	status make(nixl_xfer_op_t op, const nixlDlistH *local, indices here,
		    const nixlDlistH *remote, indices there, nixlXferReqH *&out, args extra)
	{
		lock held(mu_);
		if (!lists_.count(local) || !lists_.count(remote) || !local->agent.empty() ||
		    remote->agent.empty() || !here.count || here.count != there.count)
			return no(NIXL_ERR_INVALID_PARAM, "makeXferReq",
				  "want a local list, one of an agent, as many indices of each");
		auto r = std::make_unique<nixlXferReqH>();
		for (size_t i = 0; i < here.count; i++) {
			size_t a = static_cast<size_t>(here.list[i]);
			size_t b = static_cast<size_t>(there.list[i]);
			if (a >= local->at.size() || b >= remote->at.size())
				return no(NIXL_ERR_INVALID_PARAM, "makeXferReq",
					  "an index is outside of its list");
			r->local.push_back(local->at[a]), r->remote.push_back(remote->at[b]);
		}
		r->op = op, r->agent = remote->agent;
		return complete(held, "makeXferReq", std::move(r), out, extra);
	}
	status create(nixl_xfer_op_t op, const nixl_xfer_dlist_t &local,
		      const nixl_xfer_dlist_t &remote, const std::string &agent, nixlXferReqH *&out,
		      args extra)
	{
		lock held(mu_);
		auto r = std::make_unique<nixlXferReqH>();
		r->op = op, r->agent = agent.empty() ? name_ : agent;
		status s = locate("createXferReq", "", local, r->local);
		if (s == NIXL_SUCCESS)
			s = locate("createXferReq", r->agent, remote, r->remote);
		if (s != NIXL_SUCCESS)
			return s;
		return complete(held, "createXferReq", std::move(r), out, extra);
	}

	status post(nixlXferReqH *r, args extra)
	{
		lock held(mu_);
		if (!requests_.count(r))
			return NIXL_ERR_INVALID_PARAM;
		if (r->posted && sluice_test(r->t) == SLUICE_PENDING)
			return NIXL_ERR_REPOST_ACTIVE;
		bool anew = is_lost(r->peer);
		if (extra && message_of(extra) != r->message) {
			r->message = message_of(extra);
			anew = anew || !r->message; /* one that is there is not taken back */
			if (!anew && (r->gone = put_message("postXferReq", *r)) != NIXL_SUCCESS)
				return r->gone;
		}
		if (anew) {
			r->gone = build(held, "postXferReq", *r);
			if (r->gone != NIXL_SUCCESS)
				return r->gone;
		}
		held.unlock();
		r->ended = false, r->posted = true;
		r->times.startTime = clock::now();
		int code = sluice_post(r->t);
		r->times.postDuration = since(r->times.startTime);
		if (code < 0)
			return r->gone = sluice_nixl::ended("postXferReq", code);
		r->gone = NIXL_SUCCESS;
		return state(r);
	}
	status state(nixlXferReqH *r) const
	{
		if (!r)
			return NIXL_ERR_INVALID_PARAM;
		if (r->gone != NIXL_SUCCESS)
			return r->gone;
		if (!r->posted)
			return NIXL_ERR_NOT_POSTED;
		int code = sluice_test(r->t);
		if (code != SLUICE_PENDING && !r->ended) {
			r->ended = true;
			r->times.xferDuration = since(r->times.startTime);
			return sluice_nixl::ended("getXferStatus", code);
		}
		return sluice_nixl::status_of(code);
	}
	status telemetry(const nixlXferReqH *r, nixl_xfer_telem_t &out) const
	{
		if (!r || !timed_)
			return r ? NIXL_ERR_NO_TELEMETRY : NIXL_ERR_INVALID_PARAM;
		if (!r->posted || !r->ended)
			return NIXL_ERR_NOT_POSTED;
		out = r->times;
		return NIXL_SUCCESS;
	}
	/* By the best rate that this agent has measured, to whichever peer. */
	status estimate(const nixlXferReqH *r, std::chrono::microseconds &time,
			std::chrono::microseconds &margin, nixl_cost_t &how) const
	{
		lock held(mu_);
		if (!requests_.count(r))
			return NIXL_ERR_INVALID_PARAM;
		std::string json(16 << 10, '\0');
		size_t n = json.size();
		int code;
		while ((code = sluice_stats(engine_, &json[0], n, &n)) == SLUICE_ERR_SPACE)
			json.resize(n);
		if (code < 0)
			return sluice_nixl::ended("estimateXferCost", code);
		double best = 0, spread = 0;
		for (size_t at = 0; (at = json.find("\"p50_ns\":", at)) < n; at++) {
			double rate = number(json, "\"rate\":", at);
			if (rate <= best)
				continue;
			best = rate;
			spread = number(json, "\"p99_ns\":", at) - number(json, "\"p50_ns\":", at);
		}
		if (best <= 0)
			return no(NIXL_ERR_NOT_FOUND, "estimateXferCost",
				  "this agent has measured nothing yet: post a transfer first");
		double bytes = static_cast<double>(r->times.totalBytes);
		time = std::chrono::microseconds(static_cast<int64_t>(bytes / best * 1e6));
		margin = std::chrono::microseconds(static_cast<int64_t>(spread / 1e3));
		how = nixl_cost_t::ANALYTICAL_BACKEND;
		return NIXL_SUCCESS;
	}
	status backend_of(const nixlXferReqH *r, nixlBackendH *&out) const
	{
		if (!r)
			return NIXL_ERR_INVALID_PARAM;
		out = r->backend;
		return NIXL_SUCCESS;
	}
	status release(nixlXferReqH *r)
	{
		lock held(mu_);
		auto at = requests_.find(r);
		if (at == requests_.end())
			return NIXL_ERR_INVALID_PARAM;
		held.unlock();
		int code = sluice_abort(r->t, 30 * second);
		if (code == SLUICE_OK)
			code = sluice_transfer_close(r->t);
		if (code == SLUICE_PENDING)
			return no(NIXL_ERR_BACKEND, "releaseXferReq",
				  "nothing proves yet that no byte lands any more: call again");
		if (code < 0)
			return sluice_nixl::ended("releaseXferReq", code);
		held.lock();
		requests_.erase(r);
		return NIXL_SUCCESS;
	}
	status release(nixlDlistH *list)
	{
		lock held(mu_);
		return lists_.erase(list) ? NIXL_SUCCESS : NIXL_ERR_INVALID_PARAM;
	}

	status notifs(nixl_notifs_t &out)
	{
		lock held(mu_);
		if (!engine_)
			return NIXL_SUCCESS;
		struct sluice_notification n = {};
		n.size = sizeof n;
		do {
			n.more = 1;
			int code = sluice_receive(engine_, &n, &inbox_[0], inbox_.size(), 0);
			if (code == SLUICE_ERR_SPACE) {
				inbox_.resize(n.length);
				continue;
			}
			if (code == SLUICE_PENDING)
				return NIXL_SUCCESS;
			if (code < 0)
				return sluice_nixl::ended("getNotifs", code);
			if (n.status == SLUICE_OK)
				take(inbox_.substr(0, n.length), out);
		} while (n.more);
		return NIXL_SUCCESS;
	}
	status notify(const std::string &agent, const nixl_blob_t &message)
	{
		lock held(mu_);
		sluice_peer peer;
		status s = peer_of(held, "genNotif", agent, peer);
		if (s != NIXL_SUCCESS)
			return s;
		std::string framed = frame(message);
		held.unlock();
		return sluice_nixl::ended("genNotif", sluice_notify(peer, framed.data(),
								    framed.size(), second));
	}

private:
	/* NIXL's variable wins, where it says something. */
	static bool captures(bool config)
	{
		static const std::set<std::string> yes = {"y", "yes", "on", "1", "true", "enable"},
						   no = {"n", "no", "off", "0", "false", "disable"};
		const char *said = std::getenv("NIXL_TELEMETRY_ENABLE");
		std::string word = said ? said : "";
		for (char &c : word)
			c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
		return yes.count(word) || (config && !no.count(word));
	}
	/* The number behind a word, the next one after at; in any locale. */
	static double number(const std::string &json, const std::string &word, size_t at)
	{
		size_t from = json.find(word, at) + word.size();
		std::istringstream text(json.substr(from, json.find_first_of(",}", from) - from));
		text.imbue(std::locale::classic());
		double out = 0;
		text >> out;
		return out;
	}
	static std::chrono::microseconds since(clock::time_point t)
	{
		return std::chrono::duration_cast<std::chrono::microseconds>(clock::now() - t);
	}
	static std::optional<nixl_blob_t> message_of(args extra)
	{
		if (extra && !extra->notif && extra->hasNotif)
			return extra->notifMsg;
		return extra ? extra->notif : std::nullopt;
	}

	/* Where a list lies: with us for "" and for our own name. */
	status locate(const char *call, const std::string &agent, const nixl_xfer_dlist_t &descs,
		      pieces &out) const
	{
		met_ptr known = find(agent);
		bool own = agent.empty() || agent == name_;
		std::string why = "the metadata of " + agent + " is not loaded";
		if (descs.isEmpty())
			return no(NIXL_ERR_INVALID_PARAM, call, "the list is empty");
		if ((!own && !known) || !(own ? ours_ : known->where).locate(descs, out, why))
			return no(NIXL_ERR_NOT_FOUND, call, why);
		return NIXL_SUCCESS;
	}
	status complete(lock &held, const char *call, std::unique_ptr<nixlXferReqH> r,
			nixlXferReqH *&out, args extra)
	{
		if (r->local.size() != r->remote.size())
			return no(NIXL_ERR_INVALID_PARAM, call, "the sides differ in number");
		for (size_t i = 0; i < r->local.size(); i++) {
			if (r->local[i].length != r->remote[i].length)
				return no(NIXL_ERR_INVALID_PARAM, call,
					  "descriptors of a pair differ in length");
			r->times.totalBytes += r->local[i].length;
		}
		r->times.descCount = r->local.size();
		nixl_mem_t far = r->remote[0].in->kind;
		bool file = far == FILE_SEG || far == BLK_SEG;
		r->backend = serving(far, extra, !file);
		if (!r->backend)
			return no(NIXL_ERR_NOT_FOUND, call, "no backend serves such a transfer");
		r->message = message_of(extra);
		status s = build(held, call, *r);
		if (s != NIXL_SUCCESS)
			return s;
		out = r.get();
		requests_.emplace(out, std::move(r));
		return NIXL_SUCCESS;
	}
	/* Makes the transfer, to the agent as it is connected now, in place of an earlier one. */
	status build(lock &held, const char *call, nixlXferReqH &r)
	{
		sluice_peer peer;
		status s = peer_of(held, call, r.agent, peer);
		if (s != NIXL_SUCCESS)
			return s;
		pieces own;
		std::map<sluice_nixl::range *, sluice_nixl::range_ptr> seen;
		int code = SLUICE_OK;
		for (const auto &p : r.agent == name_ ? r.remote : own) {
			auto &in = seen[p.in.get()];
			if (!in) {
				in = std::make_shared<sluice_nixl::range>(*p.in);
				code = sluice_remote_find(peer, in->name().c_str(), &in->handle);
			}
			if (code < 0)
				return sluice_nixl::ended(call, code);
			own.push_back({in, p.offset, p.length});
		}
		std::vector<sluice_nixl::pattern> kept;
		sluice_transfer t;
		code = sluice_transfer_new(peer, r.op == NIXL_READ ? SLUICE_READ : SLUICE_WRITE,
					   nullptr, &t);
		if (code < 0)
			return sluice_nixl::ended(call, code);
		code = sluice_nixl::fill(t, r.local, own.empty() ? r.remote : own, kept);
		s = sluice_nixl::ended(call, code);
		std::swap(t, r.t);
		if (s == NIXL_SUCCESS)
			s = put_message(call, r);
		if (s != NIXL_SUCCESS)
			std::swap(t, r.t);
		if (t)
			(void)sluice_transfer_close(t);
		if (s == NIXL_SUCCESS)
			r.peer = peer, r.kept = std::move(kept), r.posted = false;
		return s;
	}
	status put_message(const char *call, nixlXferReqH &r)
	{
		if (!r.message)
			return NIXL_SUCCESS;
		std::string framed = frame(*r.message);
		return sluice_nixl::ended(
			call, sluice_transfer_message(r.t, framed.data(), framed.size()));
	}

	/* Messages carry the name of the sender, which a receiver need not know. */
	std::string frame(const nixl_blob_t &message) const
	{
		uint16_t n = static_cast<uint16_t>(name_.size());
		std::string out = "SLN\1";
		out += static_cast<char>(n & 0xff);
		out += static_cast<char>(n >> 8);
		return out + name_ + message;
	}
	static void take(const std::string &data, nixl_notifs_t &out)
	{
		if (data.size() < 6 || data.compare(0, 4, "SLN\1") != 0)
			return; /* no agent has sent it */
		size_t n = static_cast<unsigned char>(data[4]) |
			   static_cast<size_t>(static_cast<unsigned char>(data[5])) << 8;
		if (data.size() - 6 >= n)
			out[data.substr(6, n)].push_back(data.substr(6 + n));
	}

	const bool timed_;
	std::string inbox_ = std::string(64 << 10, '\0');
	std::unordered_map<const nixlDlistH *, std::unique_ptr<nixlDlistH>> lists_;
	std::unordered_map<const nixlXferReqH *, std::unique_ptr<nixlXferReqH>> requests_;
};

#endif
