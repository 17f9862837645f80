// SPDX-License-Identifier: Apache-2.0
// sluice.hpp: a transfer, exceptions, and handles that close themselves in any order.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "sluice.hpp"

static void need(bool condition, const char *what)
{
	if (condition)
		return;
	std::fprintf(stderr, "%s is false\n", what);
	std::exit(1);
}
#define NEED(c) need(c, #c)

static void run()
{
	sluice::engine a("a", {"mem"}), b("b", {"mem"});
	auto from = a.alloc(1 << 16), to = b.alloc(1 << 16);
	auto local = a.add("data", from), there = b.add("data", to);
	auto peer = a.connect(b.describe());
	sluice::kv_op none;
	none = sluice::kv_op(); // which closes nothing
	NEED(!none);
	auto remote = peer.find("data");
	std::memset(from.data, 'r', from.size);

	auto t = peer.make_transfer(SLUICE_WRITE);
	sluice_desc desc{0, 0, 1 << 16};
	t.add(local, remote, &desc, 1);
	t.message("hello");
	t.post();
	NEED(t.wait());
	NEED(t.done());
	NEED(!std::memcmp(from.data, to.data, 1 << 16));

	try {
		peer.find("nothing");
		NEED(!"found what is not there");
	} catch (const sluice::error &e) {
		NEED(e.code == SLUICE_ERR_NO_ROUTE && std::strstr(e.what(), "nothing"));
	}
	try {
		local.close();
		NEED(!"closed a region that a transfer lists");
	} catch (const sluice::error &e) {
		NEED(e.code == SLUICE_ERR_BUSY);
	}
	auto moved = std::move(t);
	NEED(!t && moved);
	moved.close();
	local.close();
	NEED(!local);
}

int main()
{
	run();
	std::puts("ok");
}
