// SPDX-License-Identifier: Apache-2.0
// sluice.h for C++17: handles that close themselves, and errors as exceptions. Whatever is
// not here is called as in C, with id(). What sluice.h says of threads holds.
#ifndef SLUICE_HPP
#define SLUICE_HPP

#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "sluice.h"

namespace sluice {

// What a call that failed throws; code is one of SLUICE_ERR_.
struct error : std::runtime_error {
	explicit error(int c) : std::runtime_error(sluice_error()), code(c) {}
	int code;
};

// Throws unless the code is SLUICE_OK or SLUICE_PENDING; true for SLUICE_OK.
inline bool check(int code)
{
	if (code < 0)
		throw error(code);
	return code == SLUICE_OK;
}

using nanoseconds = std::chrono::nanoseconds;
constexpr nanoseconds forever{SLUICE_FOREVER};

// Owns a handle. What the last close says is lost: call close() to see it.
template <int (*Close)(uint64_t)> class owner {
public:
	owner() = default;
	explicit owner(uint64_t id) : id_(id) {}
	owner(owner &&other) noexcept : id_(std::exchange(other.id_, 0)) {}
	owner &operator=(owner &&other) noexcept
	{
		std::swap(id_, other.id_);
		return *this;
	}
	~owner()
	{
		if (id_)
			(void)Close(id_);
	}
	uint64_t id() const { return id_; }
	explicit operator bool() const { return id_ != 0; }
	void close()
	{
		if (id_) {
			check(Close(id_));
			id_ = 0;
		}
	}

private:
	uint64_t id_ = 0;
};

using region = owner<sluice_region_close>;
using listener = owner<sluice_listener_close>;
using remote = sluice_remote; // the peer's, and goes with it

// sluice_kv_load and others are called with id().
using kv_cache = owner<sluice_kv_close>;
using kv_op = owner<sluice_kv_op_close>;

inline int revoke_now(uint64_t id) { return sluice_lease_revoke(id, SLUICE_FOREVER); }
using lease = owner<revoke_now>;

struct memory : owner<sluice_memory_close> {
	using owner::owner;
	void *data = nullptr;
	uint64_t size = 0;
};

// Aborts what is posted before it closes, so that no byte lands any more afterwards. Where that
// is not proved it closes all the same, and the code says so.
inline int end_transfer(uint64_t id)
{
	int code = sluice_abort(id, SLUICE_FOREVER), closed = sluice_transfer_close(id);
	return code < 0 ? code : closed;
}

struct transfer : owner<end_transfer> {
	using owner::owner;
	void add(const region &local, remote there, const sluice_desc *descs, size_t count)
	{
		check(sluice_transfer_add(id(), local.id(), there, descs, count));
	}
	void add(const region &local, remote there, const sluice_pages &pages)
	{
		check(sluice_transfer_add_pages(id(), local.id(), there, &pages));
	}
	void add(const region &local, remote there, const sluice_pattern &pattern)
	{
		check(sluice_transfer_add_pattern(id(), local.id(), there, &pattern));
	}
	void message(const std::string &text)
	{
		check(sluice_transfer_message(id(), text.data(), text.size()));
	}
	void post() { check(sluice_post(id())); }
	bool done() { return check(sluice_test(id())); }
	bool wait(nanoseconds timeout = forever)
	{
		return check(sluice_wait(id(), timeout.count()));
	}
};

struct peer : owner<sluice_peer_close> {
	using owner::owner;
	remote find(const char *name) const
	{
		remote r;
		check(sluice_remote_find(id(), name, &r));
		return r;
	}
	transfer make_transfer(uint32_t op, const char *only = nullptr) const
	{
		sluice_transfer t;
		check(sluice_transfer_new(id(), op, only, &t));
		return transfer(t);
	}
	transfer make_transfer(uint32_t op, const sluice_route &route) const
	{
		sluice_transfer t;
		check(sluice_transfer_new_route(id(), op, &route, &t));
		return transfer(t);
	}
};

struct engine : owner<sluice_close> {
	engine(const char *name, const std::vector<const char *> &backends)
	{
		std::vector<sluice_backend> list;
		for (const char *b : backends)
			list.push_back(sluice_backend{b, nullptr, 0, 0});
		sluice_config config{};
		config.size = sizeof config;
		config.name = name;
		config.backends = list.data();
		config.backends_count = list.size();
		*this = engine(config);
	}
	explicit engine(const sluice_config &config)
	{
		sluice_engine e;
		check(sluice_open(&config, &e));
		owner::operator=(owner(e));
	}
	memory alloc(uint64_t size) const
	{
		sluice_memory m;
		void *at;
		check(sluice_alloc(id(), nullptr, size, &m, &at));
		memory out(m);
		out.data = at, out.size = size;
		return out;
	}
	region add(const char *name, const sluice_segment &segment) const
	{
		sluice_region r;
		check(sluice_register(id(), name, &segment, &r));
		return region(r);
	}
	region add(const char *name, const memory &m) const
	{
		sluice_segment s{};
		s.size = sizeof s;
		s.kind = SLUICE_MEMORY;
		s.memory = m.id();
		return add(name, s);
	}
	std::string describe() const
	{
		size_t n = 0;
		int code = sluice_describe(id(), nullptr, 0, nullptr, 0, &n);
		std::string bytes;
		while (code == SLUICE_ERR_SPACE) { // it may have grown meanwhile
			bytes.resize(n);
			code = sluice_describe(id(), nullptr, 0, &bytes[0], bytes.size(), &n);
		}
		check(code);
		bytes.resize(n);
		return bytes;
	}
	peer connect(const std::string &description, nanoseconds timeout = forever) const
	{
		sluice_peer p;
		check(sluice_connect(id(), description.data(), description.size(), timeout.count(),
				     &p));
		return peer(p);
	}
};

} // namespace sluice

#endif
