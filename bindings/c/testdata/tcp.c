// SPDX-License-Identifier: Apache-2.0
// Two engines over sockets, in plain text, and with certificates when argv names the files of
// a certificate, its key and the authority; a side without what the other wants gets nothing.
#include "check.h"

static const char *const plain[] = {"plaintext=true", "listen=127.0.0.1:0", "conns=2", NULL};

static int try_open(const char *const *options, sluice_engine *engine)
{
	struct sluice_backend list[] = {{.name = "tcp", .options = options}};
	struct sluice_config config = {.size = sizeof config,
				       .name = "tcp",
				       .backends = list,
				       .backends_count = 1};
	return sluice_open(&config, engine);
}

static struct end open_over(const char *const *options)
{
	struct end e;
	OK(try_open(options, &e.engine));
	OK(sluice_alloc(e.engine, NULL, 1 << 20, &e.memory, (void **)&e.bytes));
	struct sluice_segment segment = {.size = sizeof segment,
					 .kind = SLUICE_MEMORY,
					 .memory = e.memory};
	OK(sluice_register(e.engine, "data", &segment, &e.region));
	return e;
}

static void moves(const char *const *options)
{
	struct end a = open_over(options), b = open_over(options);
	sluice_remote there;
	sluice_peer peer = connect_ends(&a, &b, &there);
	for (size_t i = 0; i < 1 << 20; i++)
		a.bytes[i] = (unsigned char)(i * 7);
	sluice_transfer t = new_transfer(peer, SLUICE_WRITE);
	add_one(t, a.region, there, 4096, 100, 500000);
	OK(sluice_transfer_message(t, "m", 1));
	for (int i = 0; i < 3; i++) {
		memset(b.bytes, 0, 1 << 20);
		OK(sluice_post(t));
		OK(sluice_wait(t, LIMIT));
		char message[4];
		struct sluice_notification note = {.size = sizeof note};
		OK(sluice_receive(b.engine, &note, message, sizeof message, LIMIT));
		TRUE(note.length == 1 && !memcmp(b.bytes + 100, a.bytes + 4096, 500000) &&
		     !b.bytes[99] && !b.bytes[500100]);
	}
	close_end(&a);
	close_end(&b);
}

static void refuses(void)
{
	sluice_engine e;
	const char *const
	    both[] = {"plaintext=true", "certificate=x", NULL},
	    *const half[] = {"certificate=x", NULL}, *const misspelt[] = {"plaintxt=true", NULL},
	    *const no_bool[] = {"plaintext=perhaps", NULL}, *const hidden[] = {"tls=x", NULL},
	    *const absent[] = {"certificate=/nowhere", "key=/nowhere", "authority=/nowhere", NULL};
	WANT(SLUICE_ERR_ARGUMENT, try_open(both, &e));
	TEXT("want one of them");
	WANT(SLUICE_ERR_ARGUMENT, try_open(half, &e));
	TEXT("go together");
	WANT(SLUICE_ERR_ARGUMENT, try_open(misspelt, &e));
	TEXT("authority");
	WANT(SLUICE_ERR_ARGUMENT, try_open(no_bool, &e));
	WANT(SLUICE_ERR_ARGUMENT, try_open(hidden, &e));
	WANT(SLUICE_ERR_SYSTEM, try_open(absent, &e));
	TEXT("/nowhere");
}

int main(int argc, char **argv)
{
	static const char *const pinned[] = {"listen=127.0.0.1:0", NULL};

	refuses();
	moves(plain);
	moves(pinned);
	if (argc == 4) {
		char words[3][512];
		snprintf(words[0], sizeof words[0], "certificate=%s", argv[1]);
		snprintf(words[1], sizeof words[1], "key=%s", argv[2]);
		snprintf(words[2], sizeof words[2], "authority=%s", argv[3]);
		const char *const secure[] = {words[0], words[1], words[2], "listen=127.0.0.1:0",
					      NULL};
		const char *const named[] = {words[0],
					     words[1],
					     words[2],
					     "listen=127.0.0.1:0",
					     "server_name=stranger.test",
					     NULL};
		moves(secure);
		struct end plainly = open_over(plain), securely = open_over(secure),
			   choosy = open_over(named);
		char description[4096];
		size_t length;
		sluice_peer peer;
		OK(sluice_describe(securely.engine, NULL, 0, description, sizeof description,
				   &length));
		TRUE(sluice_connect(plainly.engine, description, length, LIMIT, &peer) < 0);
		// it is another's certificate
		TRUE(sluice_connect(choosy.engine, description, length, LIMIT, &peer) < 0);
		close_end(&plainly);
		close_end(&securely);
		close_end(&choosy);
	}
	puts("ok");
	return 0;
}
