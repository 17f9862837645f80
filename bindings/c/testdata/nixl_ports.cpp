// SPDX-License-Identifier: Apache-2.0
// nixl.h: agents that exchange their metadata by ports, in one process and in two. The first
// argument names their backends; the second, a port, makes this program the other process.
#include <arpa/inet.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <utils/serdes/serdes.h>

#include "nixl_side.h"

extern char **environ;

static const nixl_xfer_dlist_t none(DRAM_SEG);

static sockaddr_in loopback(uint16_t port)
{
	sockaddr_in a = {};
	a.sin_family = AF_INET;
	a.sin_port = htons(port);
	a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	return a;
}

// An agent that listens at a port that was free; another program may be quicker.
static std::unique_ptr<side> listening(const char *name, const char *type, uint16_t &port)
{
	for (int i = 0; i < 100; i++) {
		int fd = socket(AF_INET, SOCK_STREAM, 0);
		sockaddr_in at = loopback(0);
		socklen_t n = sizeof at;
		NEED(bind(fd, reinterpret_cast<sockaddr *>(&at), n) == 0);
		NEED(getsockname(fd, reinterpret_cast<sockaddr *>(&at), &n) == 0);
		port = ntohs(at.sin_port);
		close(fd);
		try {
			return std::make_unique<side>(name, type, false, port);
		} catch (const std::runtime_error &) {
		}
	}
	NEED(!"found a port");
	return nullptr;
}

static nixl_opt_args_t to(uint16_t port)
{
	nixl_opt_args_t a;
	a.ipAddr = "127.0.0.1";
	a.port = port;
	return a;
}

static void until(nixlAgent &agent, const char *name, nixl_status_t want,
		  const nixl_xfer_dlist_t &descs = none)
{
	while (agent.checkRemoteMD(name, descs) != want)
		std::this_thread::yield();
}

// What no agent sends is hung up on, and the next caller is answered.
static void strange(uint16_t port)
{
	for (const std::string &said : {std::string("GET / HTTP/1.1\r\n\r\n"),
					std::string("SLNXG\xff\xff\xff\xff", 9),
					std::string("SLNXP\4\0\0\0junk", 13)}) {
		int fd = socket(AF_INET, SOCK_STREAM, 0);
		sockaddr_in at = loopback(port);
		char byte;
		NEED(connect(fd, reinterpret_cast<sockaddr *>(&at), sizeof at) == 0);
		NEED(send(fd, said.data(), said.size(), 0) == static_cast<ssize_t>(said.size()));
		NEED(recv(fd, &byte, 1, 0) <= 0);
		close(fd);
	}
}

static void write_to(side &a, side &b, const char *name, char value)
{
	nixlXferReqH *r = nullptr;
	std::memset(a.bytes.data(), value, N);
	auto from = blocks(a.bytes, {0}, N), there = blocks(b.bytes, {0}, N);
	OK(a.agent.createXferReq(NIXL_WRITE, from, there, name, r));
	OK(finish(a.agent, r));
	OK(a.agent.releaseXferReq(r));
	NEED(!std::memcmp(a.bytes.data(), b.bytes.data(), N));
}

// What two threads load at once is met once: what forgets it ends the transfers of both.
static void both_at_once(side &b, const char *type)
{
	nixl_blob_t blob;
	OK(b.agent.getLocalMD(blob));
	for (int round = 0; round < 10; round++) {
		side d("delta", type);
		nixlXferReqH *made[2] = {};
		auto half = [&](int i) {
			std::string name;
			size_t at = i ? N / 2 : 0;
			OK(d.agent.loadRemoteMD(blob, name));
			OK(d.agent.createXferReq(NIXL_WRITE, blocks(d.bytes, {at}, N / 2),
						 blocks(b.bytes, {at}, N / 2), "beta", made[i]));
			OK(finish(d.agent, made[i]));
		};
		std::thread one(half, 0), two(half, 1);
		one.join(), two.join();
		OK(d.agent.invalidateRemoteMD("beta"));
		for (nixlXferReqH *r : made) {
			NEED(finish(d.agent, r) == NIXL_ERR_NOT_FOUND);
			OK(d.agent.releaseXferReq(r));
		}
	}
}

static void exchanged(const char *type)
{
	uint16_t at = 0, other = 0;
	auto a = listening("alpha", type, at), b = listening("beta", type, other);
	side c("gamma", type);
	nixl_opt_args_t a_port = to(at), b_port = to(other), nowhere;
	NEED(c.agent.sendLocalMD() == NIXL_ERR_INVALID_PARAM);
	NEED(c.agent.fetchRemoteMD("alpha", &nowhere) == NIXL_ERR_INVALID_PARAM);
	try {
		side("delta", type, false, at);
		NEED(!"two agents listen at one port");
	} catch (const std::runtime_error &) {
	}
	strange(at);

	OK(b->agent.sendLocalMD(&a_port));
	until(a->agent, "beta", NIXL_SUCCESS, blocks(b->bytes, {0}, N));
	write_to(*a, *b, "beta", 'a');

	// One that listens under another name is not taken for the one that was asked for.
	OK(c.agent.fetchRemoteMD("beta", &a_port));
	OK(c.agent.fetchRemoteMD("alpha", &a_port));
	until(c.agent, "alpha", NIXL_SUCCESS, blocks(a->bytes, {0}, N));
	NEED(c.agent.checkRemoteMD("beta", none) == NIXL_ERR_NOT_FOUND);
	write_to(c, *a, "alpha", 'c');

	// Of two ranges one is told.
	std::vector<char> more(N);
	nixl_reg_dlist_t second(DRAM_SEG), unknown(DRAM_SEG);
	second.addDesc(whole(more));
	OK(a->agent.registerMem(second));
	OK(a->agent.sendLocalPartialMD(second, &b_port));
	until(b->agent, "alpha", NIXL_SUCCESS, second.trim());
	NEED(b->agent.checkRemoteMD("alpha", blocks(a->bytes, {0}, N)) == NIXL_ERR_NOT_FOUND);
	unknown.addDesc(nixlBlobDesc(1, 2, 3, ""));
	NEED(a->agent.sendLocalPartialMD(unknown, &b_port) == NIXL_ERR_NOT_FOUND);

	OK(b->agent.invalidateLocalMD(&a_port));
	until(a->agent, "beta", NIXL_ERR_NOT_FOUND);
	OK(c.agent.invalidateRemoteMD("alpha"));
	both_at_once(*b, type);
}

// The other process: it fetches the metadata of the first, tells it where its memory lies, and
// ends when it is told to.
static void second(const char *type, uint16_t port)
{
	side b("beta", type);
	nixl_opt_args_t there = to(port);
	std::memset(b.bytes.data(), 'b', N);
	OK(b.agent.sendLocalMD(&there));
	OK(b.agent.fetchRemoteMD("alpha", &there));
	until(b.agent, "alpha", NIXL_SUCCESS);
	nixlSerDes list;
	OK(blocks(b.bytes, {0, N / 2}, N / 2).serialize(&list));
	OK(tell(b, "alpha", list.exportStr()));
	NEED(heard(b, "alpha", 1)[0] == "written");
	NEED(b.bytes[0] == 'b' && b.bytes[N / 2 - 1] == 'b');
	NEED(b.bytes[N / 2] == 'a' && b.bytes[N - 1] == 'a');
	OK(tell(b, "alpha", "seen"));
	NEED(heard(b, "alpha", 1)[0] == "end");
}

static void two_processes(const char *program, const char *type)
{
	uint16_t port = 0;
	auto a = listening("alpha", type, port);
	std::string text = std::to_string(port);
	char *args[] = {const_cast<char *>(program), const_cast<char *>(type), &text[0], nullptr};
	pid_t child;
	NEED(posix_spawn(&child, program, nullptr, nullptr, args, environ) == 0);

	nixlSerDes told;
	OK(told.importStr(heard(*a, "beta", 1)[0]));
	nixl_xfer_dlist_t list(&told);
	NEED(list.descCount() == 2);
	until(a->agent, "beta", NIXL_SUCCESS, list);
	nixlDlistH *near = nullptr, *far = nullptr;
	nixlXferReqH *read = nullptr, *write = nullptr;
	std::memset(a->bytes.data(), 'a', N);
	OK(a->agent.prepXferDlist(blocks(a->bytes, {0, N / 2}, N / 2), near));
	OK(a->agent.prepXferDlist("beta", list, far));
	OK(a->agent.makeXferReq(NIXL_READ, near, {0}, far, {1}, read));
	OK(finish(a->agent, read));
	NEED(a->bytes[0] == 'b' && a->bytes[N / 2 - 1] == 'b' && a->bytes[N / 2] == 'a');
	nixl_opt_args_t extra;
	extra.notif = "written";
	OK(a->agent.makeXferReq(NIXL_WRITE, near, {1}, far, {1}, write, &extra));
	OK(finish(a->agent, write));
	NEED(heard(*a, "beta", 1)[0] == "seen");
	OK(tell(*a, "beta", "end"));

	int status = 0;
	NEED(waitpid(child, &status, 0) == child && status == 0);
	until(a->agent, "beta", NIXL_ERR_NOT_FOUND); // lost, and known still
	NEED(a->agent.genNotif("beta", "gone") == NIXL_ERR_REMOTE_DISCONNECT);
	NEED(finish(a->agent, read) == NIXL_ERR_REMOTE_DISCONNECT);
	OK(a->agent.releaseXferReq(read));
	OK(a->agent.releaseXferReq(write));
	OK(a->agent.releasedDlistH(near));
	OK(a->agent.releasedDlistH(far));
}

int main(int argc, char **argv)
{
	NEED(argc == 2 || argc == 3);
	setenv("NIXL_LOG_LEVEL", "FATAL", 1);
	if (argc == 3) {
		second(argv[1], static_cast<uint16_t>(std::atoi(argv[2])));
		return 0;
	}
	exchanged(argv[1]);
	two_processes(argv[0], argv[1]);
	std::puts("ok");
}
