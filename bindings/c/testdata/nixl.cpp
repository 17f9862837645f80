// SPDX-License-Identifier: Apache-2.0
// nixl.h: what a program for NIXL does, with two agents that reach each other by backends of the
// name that is the first argument; the second is a folder for files.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <nixl_types.h>
#include <utils/common/nixl_time.h>
#include <utils/serdes/serdes.h>

#include "nixl_side.h"

// As the smallest example of NIXL: one write with a message.
static void write_once(side &a, side &b)
{
	std::memset(a.bytes.data(), 0xbb, N);
	nixlXferReqH *r = nullptr;
	nixl_opt_args_t extra;
	extra.backends.push_back(a.backend);
	extra.notifMsg = "notification", extra.hasNotif = true;
	auto from = blocks(a.bytes, {16}, 8), to = blocks(b.bytes, {8}, 8);
	OK(a.agent.createXferReq(NIXL_WRITE, from, to, "beta", r, &extra));
	NEED(a.agent.getXferStatus(r) == NIXL_ERR_NOT_POSTED);
	OK(finish(a.agent, r));
	NEED(heard(b, "alpha", 1)[0] == "notification");
	NEED(!std::memcmp(b.bytes.data() + 8, a.bytes.data(), 8) && !b.bytes[7] && !b.bytes[16]);
	nixlBackendH *by = nullptr;
	OK(a.agent.queryXferBackend(r, by));
	NEED(by == a.backend);
	nixl_opt_args_t other, none;
	other.notif = "another";
	OK(finish(a.agent, r, &other));
	NEED(heard(b, "alpha", 1)[0] == "another");
	OK(finish(a.agent, r, &none)); // takes the message back
	OK(tell(a, "beta", std::string("text\0with 0", 11)));
	NEED(heard(b, "alpha", 1)[0] == std::string("text\0with 0", 11));
	nixl_xfer_telem_t times;
	OK(a.agent.getXferTelemetry(r, times));
	nixlTime::us_t now = nixlTime::getUs(); // by the clock of the telemetry
	auto began = std::chrono::duration_cast<chrono_period_us_t>(
		times.startTime.time_since_epoch());
	NEED(now >= static_cast<uint64_t>(began.count()) && nixlTime::getNs() / 1000 >= now);
	NEED(now / 1000000 <= nixlTime::getSec() && now / 1000 <= nixlTime::getMs());
	NEED(times.totalBytes == 8 && times.descCount == 1 && times.xferDuration.count() >= 0);
	OK(a.agent.releaseXferReq(r));
	NEED(a.agent.releaseXferReq(r) == NIXL_ERR_INVALID_PARAM);
}

// What a transfer will take, by what was measured; that is known a while after some have ended.
static void estimated(side &a, side &b)
{
	std::chrono::microseconds small(-1), large(-1), margin(-1);
	nixl_cost_t how;
	nixlXferReqH *one = nullptr, *all = nullptr;
	auto make = [&](size_t n, nixlXferReqH *&r) {
		auto from = blocks(a.bytes, {0}, n), to = blocks(b.bytes, {0}, n);
		OK(a.agent.createXferReq(NIXL_WRITE, from, to, "beta", r));
	};
	make(N / 4, one), make(N, all);
	NEED(a.agent.estimateXferCost(all, large, margin, how) == NIXL_ERR_NOT_FOUND);
	NEED(a.agent.estimateXferCost(nullptr, large, margin, how) == NIXL_ERR_INVALID_PARAM);
	do
		OK(finish(a.agent, all));
	while (a.agent.estimateXferCost(all, large, margin, how) == NIXL_ERR_NOT_FOUND);
	OK(a.agent.estimateXferCost(all, large, margin, how));
	OK(a.agent.estimateXferCost(one, small, margin, how));
	NEED(how == nixl_cost_t::ANALYTICAL_BACKEND && margin.count() >= 0);
	NEED(large.count() > 0 && large.count() < 10000000); // a mebibyte
	NEED(std::abs(large.count() - 4 * small.count()) < 5);
	OK(a.agent.releaseXferReq(one));
	OK(a.agent.releaseXferReq(all));
}

// Network devices: one that is not there is refused, beside one that is there it is left out.
static void devices()
{
	nixlAgent agent("devices", nixlAgentConfig());
	nixlBackendH *h = nullptr;
	for (const char *word : {"device_list", "ucx_devices"})
		NEED(agent.createBackend("UCX", {{word, "nosuch0, nosuch1:1"}}, h) < 0 && !h);
	void *ucx = dlopen("libucp.so.0", RTLD_NOW);
	OK(agent.createBackend("UCX", {{"device_list", ucx ? "nosuch0,lo" : ""}}, h));
	std::vector<char> bytes(N);
	nixl_reg_dlist_t list(DRAM_SEG);
	list.addDesc(whole(bytes));
	OK(agent.registerMem(list));
}

// Lists that are prepared once, by indices, as blocks and at odd places; and to itself.
static void prepared(side &a, side &b)
{
	for (size_t i = 0; i < N; i++)
		a.bytes[i] = static_cast<char>(i * 7 % 251);
	for (const char *agent : {"beta", "alpha"}) {
		side &to = agent[0] == 'b' ? b : a;
		size_t base = agent[0] == 'b' ? 0 : N / 2;
		std::vector<size_t> here, there;
		std::vector<int> one, two;
		for (int i = 0; i < 64; i++) {
			here.push_back(static_cast<size_t>(i) * 1024);
			there.push_back(base + static_cast<size_t>(i) * 2048 + (i == 9));
			one.push_back(63 - i), two.push_back(i);
		}
		nixlDlistH *near = nullptr, *far = nullptr;
		nixlXferReqH *r = nullptr;
		OK(a.agent.prepXferDlist(NIXL_INIT_AGENT, blocks(a.bytes, here, 656), near));
		OK(a.agent.prepXferDlist(agent, blocks(to.bytes, there, 656), far));
		for (size_t n : {size_t{64}, size_t{8}, size_t{3}}) { // 64 with one off the pattern
			one.resize(n), two.resize(n);
			std::memset(to.bytes.data() + base, 0, N / 2);
			OK(a.agent.makeXferReq(NIXL_WRITE, near, one, far, two, r));
			OK(finish(a.agent, r));
			OK(a.agent.releaseXferReq(r));
			for (size_t i = 0; i < n; i++) {
				const char *sent = &a.bytes[here[static_cast<size_t>(one[i])]];
				NEED(!std::memcmp(to.bytes.data() + there[i], sent, 656));
			}
		}
#if __cplusplus >= 202002L
		std::memset(to.bytes.data() + base, 0, N / 2);
		OK(a.agent.makeXferReq(NIXL_WRITE, *near, std::span<const int>(one).subspan(1), *far,
				       std::span<const int>(two).first(2), r));
		OK(finish(a.agent, r));
		OK(a.agent.releaseXferReq(r));
		for (size_t i : {size_t{1}, size_t{2}}) {
			const char *sent = &a.bytes[here[static_cast<size_t>(one[i])]];
			NEED(!std::memcmp(to.bytes.data() + there[i - 1], sent, 656));
		}
#endif
		one[0] = 64;
		NEED(a.agent.makeXferReq(NIXL_READ, near, one, far, two, r) ==
		     NIXL_ERR_INVALID_PARAM);
		OK(a.agent.releasedDlistH(near));
		NEED(a.agent.makeXferReq(NIXL_READ, near, two, far, two, r) ==
		     NIXL_ERR_INVALID_PARAM);
		OK(a.agent.releasedDlistH(far));
	}
}

static void refused(side &a, side &b)
{
	nixlXferReqH *r = nullptr;
	nixlBackendH *h = nullptr;
	std::string name;
	nixl_blob_t blob;
	auto from = blocks(a.bytes, {0}, 64), past = blocks(b.bytes, {N - 63}, 64);
	NEED(a.agent.createXferReq(NIXL_WRITE, from, past, "beta", r) == NIXL_ERR_NOT_FOUND);
	NEED(a.agent.createXferReq(NIXL_WRITE, from, from, "nobody", r) == NIXL_ERR_NOT_FOUND);
	NEED(a.agent.createBackend("OBJ", {}, h) == NIXL_ERR_NOT_FOUND);
	NEED(a.agent.createBackend("POSIX", {}, h) == NIXL_ERR_NOT_ALLOWED);
	OK(b.agent.getLocalMD(blob));
	blob[blob.size() / 2] ^= 1;
	NEED(a.agent.loadRemoteMD(blob, name) == NIXL_ERR_MISMATCH);
	OK(a.agent.getLocalMD(blob));
	NEED(a.agent.loadRemoteMD(blob, name) == NIXL_ERR_INVALID_PARAM);
	NEED(a.agent.sendLocalMD() == NIXL_ERR_INVALID_PARAM); // to whom
	try {
		nixlAgent("", nixlAgentConfig());
		NEED(!"made an agent without a name");
	} catch (const std::invalid_argument &) {
	}
	// What a request lists is not deregistered; what was deregistered is out of reach.
	OK(a.agent.createXferReq(NIXL_WRITE, from, blocks(b.bytes, {0}, 64), "beta", r));
	NEED(a.agent.deregisterMem(a.memory) == NIXL_ERR_NOT_ALLOWED);
	OK(b.agent.deregisterMem(b.memory));
	NEED(finish(a.agent, r) < 0);
	OK(a.agent.releaseXferReq(r));
	OK(a.agent.deregisterMem(a.memory));
	NEED(a.agent.deregisterMem(a.memory) == NIXL_ERR_NOT_FOUND);
	NEED(a.agent.checkRemoteMD("beta", nixl_xfer_dlist_t(DRAM_SEG)) == NIXL_SUCCESS);
	OK(a.agent.invalidateRemoteMD("beta"));
	NEED(a.agent.checkRemoteMD("beta", nixl_xfer_dlist_t(DRAM_SEG)) == NIXL_ERR_NOT_FOUND);
	NEED(a.agent.genNotif("beta", "gone") == NIXL_ERR_NOT_FOUND);
}

// A view is for the code of a card: it is refused, and the handle is left as it was.
// One of two registrations ends: what the other holds is reached still, from both sides.
static void twice(side &a, side &b)
{
	nixl_reg_dlist_t part(DRAM_SEG);
	part.addDesc(nixlBlobDesc(reinterpret_cast<uintptr_t>(a.bytes.data()), 4096, 0, ""));
	OK(a.agent.registerMem(a.memory));
	OK(b.agent.registerMem(b.memory));
	OK(a.agent.registerMem(part));
	meet(a, b, "beta");
	nixlXferReqH *r = nullptr;
	auto from = blocks(a.bytes, {0}, 4096), to = blocks(b.bytes, {0}, 4096);
	OK(a.agent.createXferReq(NIXL_WRITE, from, to, "beta", r));
	for (char value : {'a', 'b', 'c'}) {
		std::memset(a.bytes.data(), value, 4096);
		OK(finish(a.agent, r));
		NEED(!std::memcmp(a.bytes.data(), b.bytes.data(), 4096));
		if (value == 'a') {
			OK(a.agent.deregisterMem(part));
			OK(b.agent.deregisterMem(b.memory));
		} else if (value == 'b') {
			meet(a, b, "beta");
			OK(a.agent.deregisterMem(a.memory));
			OK(b.agent.registerMem(b.memory)); // and its region is back
			OK(b.agent.deregisterMem(b.memory));
		}
	}
	NEED(a.agent.deregisterMem(part) == NIXL_ERR_NOT_FOUND);
	NEED(a.agent.deregisterMem(a.memory) == NIXL_ERR_NOT_ALLOWED);
	OK(a.agent.releaseXferReq(r));
}

static void views(side &a, side &b)
{
	static_assert(nixlAgent::getApiVersion() == nixlApiVersionV1);
	int other = 0;
	nixlMemViewH view = &other;
	nixl_remote_dlist_t remote(DRAM_SEG);
	remote.addDesc(nixlRemoteDesc(whole(b.bytes), "beta"));
	remote.addDesc(nixlRemoteDesc(0, 0, 0, nixl_null_agent));
	NEED(a.agent.prepMemView(blocks(a.bytes, {0}, 8), view) == NIXL_ERR_NOT_SUPPORTED);
	NEED(a.agent.prepMemView(remote, view) == NIXL_ERR_NOT_SUPPORTED && view == &other);
	a.agent.releaseMemView(nullptr);
}

static void serialized()
{
	nixlSerDes out, in;
	nixl_reg_dlist_t list(FILE_SEG), cut(DRAM_SEG);
	list.addDesc(nixlBlobDesc(4096, 512, 3, std::string("a\0b", 3)));
	list.addDesc(nixlBlobDesc(1, 2, 3, ""));
	OK(list.serialize(&out));
	OK(out.addStr("after", "wards"));
	std::string bytes = out.exportStr();
	OK(in.importStr(bytes));
	NEED(nixl_reg_dlist_t(&in) == list && in.getStr("after") == "wards");
	for (size_t n = 0; n < bytes.size(); n++)
		if (in.importStr(bytes.substr(0, n)) == NIXL_SUCCESS)
			NEED(!(nixl_reg_dlist_t(&in) == list) || in.getStr("after").empty());
	NEED(list.trim().getIndex(nixlBasicDesc(1, 2, 3)) == 1);
	list.remDesc(0);
	NEED(list.descCount() == 1 && list[0].covers(nixlBasicDesc(2, 1, 3)));
}

static void files(const std::string &folder)
{
	side a("files", "POSIX");
	int fd = open((folder + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	NEED(fd >= 0);
	nixl_reg_dlist_t file(FILE_SEG);
	file.addDesc(nixlBlobDesc(0, 2 * N, static_cast<uint64_t>(fd), ""));
	OK(a.agent.registerMem(file));
	nixl_xfer_dlist_t there(FILE_SEG);
	there.addDesc(nixlBasicDesc(N / 2, N, static_cast<uint64_t>(fd)));
	for (nixl_xfer_op_t op : {NIXL_WRITE, NIXL_READ}) {
		nixlXferReqH *r = nullptr;
		std::memset(a.bytes.data(), op == NIXL_WRITE ? 'w' : 0, N);
		OK(a.agent.createXferReq(op, blocks(a.bytes, {0}, N), there, "files", r));
		OK(finish(a.agent, r));
		OK(a.agent.releaseXferReq(r));
		NEED(a.bytes[0] == 'w' && a.bytes[N - 1] == 'w');
	}
	NEED(lseek(fd, 0, SEEK_END) == static_cast<off_t>(N + N / 2));
	std::vector<nixl_query_resp_t> said;
	nixl_reg_dlist_t asked(FILE_SEG);
	asked.addDesc(nixlBlobDesc(0, 0, 0, folder + "/file"));
	asked.addDesc(nixlBlobDesc(0, 0, 0, folder + "/missing"));
	OK(a.agent.deregisterMem(file));
	for (int mode : {O_WRONLY, O_RDONLY}) { // of no length, and of one direction
		int one = open((folder + "/file").c_str(), mode | O_CLOEXEC);
		nixl_reg_dlist_t all(FILE_SEG);
		all.addDesc(nixlBlobDesc(0, 0, static_cast<uint64_t>(one), ""));
		OK(a.agent.registerMem(all));
		nixl_xfer_dlist_t at(FILE_SEG);
		at.addDesc(nixlBasicDesc(N / 2, N, static_cast<uint64_t>(one)));
		for (nixl_xfer_op_t op : {NIXL_WRITE, NIXL_READ}) {
			nixlXferReqH *r = nullptr;
			nixl_status_t s =
				a.agent.createXferReq(op, blocks(a.bytes, {0}, N), at, "files", r);
			s = s == NIXL_SUCCESS ? finish(a.agent, r) : s;
			NEED((s == NIXL_SUCCESS) == ((op == NIXL_WRITE) == (mode == O_WRONLY)));
			if (r)
				OK(a.agent.releaseXferReq(r));
		}
		OK(a.agent.deregisterMem(all));
		close(one);
	}
	nixl_opt_args_t extra;
	extra.backends.push_back(a.backend);
	OK(a.agent.queryMem(asked, said, &extra));
	NEED(said.size() == 2 && said[0]->at("size") == std::to_string(N + N / 2) && !said[1]);
	close(fd);
}

// Shuts every connection over TCP of this process, as a reset does.
static void cut()
{
	for (int fd = 0; fd < 1024; fd++) {
		struct sockaddr_storage at;
		socklen_t n = sizeof at;
		if (getpeername(fd, reinterpret_cast<sockaddr *>(&at), &n) == 0 &&
		    (at.ss_family == AF_INET || at.ss_family == AF_INET6))
			shutdown(fd, SHUT_RDWR);
	}
}

// An agent that was lost and lives is connected anew: lists and requests serve on.
static void lost_and_found(side &a, side &b)
{
	nixl_xfer_dlist_t none(DRAM_SEG);
	nixlDlistH *near = nullptr, *far = nullptr;
	nixlXferReqH *r = nullptr, *made = nullptr;
	auto from = blocks(a.bytes, {0}, N), to = blocks(b.bytes, {0}, N);
	OK(a.agent.prepXferDlist("", from, near));
	OK(a.agent.prepXferDlist("beta", to, far));
	meet(a, b, "beta"); // once more
	nixl_opt_args_t extra;
	extra.notif = "again";
	OK(a.agent.createXferReq(NIXL_WRITE, from, to, "beta", r, &extra));
	for (char value : {'1', '2', '3'}) {
		if (value != '1') {
			cut();
			while (a.agent.checkRemoteMD("beta", none) == NIXL_SUCCESS)
				std::this_thread::yield();
		}
		std::memset(a.bytes.data(), value, N);
		if (value == '2') {
			OK(patient([&] {
				return a.agent.makeXferReq(NIXL_WRITE, near, {0}, far, {0}, made);
			}));
			OK(finish(a.agent, made));
			OK(a.agent.releaseXferReq(made));
		} else {
			OK(patient([&] { return finish(a.agent, r); }));
			NEED(heard(b, "alpha", 1)[0] == "again");
		}
		NEED(!std::memcmp(a.bytes.data(), b.bytes.data(), N));
	}
	OK(a.agent.releaseXferReq(r));
}

static void ends(side &a)
{
	auto b = std::make_unique<side>("beta", "TCP");
	meet(a, *b, "beta");
	b.reset();
	nixl_xfer_dlist_t none(DRAM_SEG);
	while (a.agent.checkRemoteMD("beta", none) == NIXL_SUCCESS)
		std::this_thread::yield();
	for (int i = 0; i < 100; i++) // and does not wait each time
		NEED(a.agent.genNotif("beta", "gone") == NIXL_ERR_REMOTE_DISCONNECT);
	side other("beta", "TCP");
	meet(a, other, "beta");
	OK(tell(a, "beta", "here"));
	NEED(heard(other, "alpha", 1)[0] == "here");
}

int main(int argc, char **argv)
{
	NEED(argc == 3);
	setenv("NIXL_LOG_LEVEL", "FATAL", 1);
	{
		side a("alpha", argv[1], true), b("beta", argv[1]);
		meet(a, b, "beta");
		estimated(a, b);
		write_once(a, b);
		prepared(a, b);
		twice(a, b);
		views(a, b);
		refused(a, b);
	}
	if (!std::strcmp(argv[1], "TCP")) {
		side a("alpha", "TCP"), b("beta", "TCP");
		meet(a, b, "beta");
		lost_and_found(a, b);
		side c("alpha", "TCP");
		ends(c);
	}
	devices();
	serialized();
	files(argv[2]);
	std::puts("ok");
}
