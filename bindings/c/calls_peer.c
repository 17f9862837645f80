// SPDX-License-Identifier: Apache-2.0
// The functions of sluice.h around peers and their regions, and messages.
#include "_cgo_export.h"
#include "faces.h"

int sluice_describe(sluice_engine engine, const sluice_region *regions, size_t count, void *buffer,
		    size_t capacity, size_t *length)
{
	SLGO_NEED(length);
	SLGO_NEED(buffer || !capacity);
	SLGO_CALL(slgoDescribe, engine, (uint64_t *)regions, count, buffer, capacity, length);
}

int sluice_connect(sluice_engine engine, const void *description, size_t length, int64_t timeout_ns,
		   sluice_peer *peer)
{
	SLGO_NEED(peer);
	SLGO_CALL(slgoConnect, engine, (uint8_t *)description, length, timeout_ns, peer);
}

int sluice_self(sluice_engine engine, sluice_peer *peer)
{
	SLGO_NEED(peer);
	SLGO_CALL(slgoSelf, engine, peer);
}

int sluice_serve(sluice_engine engine, const char *network, const char *address, char *bound,
		 size_t capacity, sluice_listener *listener)
{
	SLGO_NEED(network);
	SLGO_NEED(address);
	SLGO_NEED(listener);
	SLGO_CALL(slgoServe, engine, (char *)network, (char *)address, (uint8_t *)bound, capacity,
		  listener);
}

int sluice_listener_close(sluice_listener listener) { SLGO_CALL(slgoListenerClose, listener); }

int sluice_accept(sluice_engine engine, int64_t timeout_ns, sluice_peer *peer)
{
	SLGO_NEED(peer);
	SLGO_CALL(slgoAccept, engine, timeout_ns, peer);
}

int sluice_dial(sluice_engine engine, const char *network, const char *address, int64_t timeout_ns,
		sluice_peer *peer)
{
	SLGO_NEED(network);
	SLGO_NEED(address);
	SLGO_NEED(peer);
	SLGO_CALL(slgoDial, engine, (char *)network, (char *)address, timeout_ns, peer);
}

int sluice_peer_lost(sluice_peer peer, int *lost)
{
	SLGO_NEED(lost);
	SLGO_CALL(slgoPeerLost, peer, lost);
}

int sluice_peer_about(sluice_peer peer, void *buffer, size_t capacity, size_t *length)
{
	SLGO_NEED(length);
	SLGO_NEED(buffer || !capacity);
	SLGO_CALL(slgoPeerAbout, peer, buffer, capacity, length);
}

int sluice_peer_refresh(sluice_peer peer, const void *description, size_t length)
{
	SLGO_CALL(slgoPeerRefresh, peer, (uint8_t *)description, length);
}

int sluice_peer_close(sluice_peer peer) { SLGO_CALL(slgoPeerClose, peer); }

int sluice_remote_find(sluice_peer peer, const char *name, sluice_remote *remote)
{
	SLGO_NEED(name);
	SLGO_NEED(remote);
	SLGO_CALL(slgoRemoteFind, peer, (char *)name, remote);
}

int sluice_remote_find_many(sluice_peer peer, const char *const *names, size_t count,
			    sluice_remote *remotes, uint64_t *lengths)
{
	SLGO_CALL(slgoRemoteFindMany, peer, (char **)names, count, remotes, lengths);
}

int sluice_remote_import(sluice_peer peer, const void *token, size_t length, sluice_remote *remote)
{
	SLGO_NEED(remote);
	SLGO_CALL(slgoRemoteImport, peer, (uint8_t *)token, length, remote);
}

int sluice_remote_length(sluice_remote remote, uint64_t *bytes)
{
	SLGO_NEED(bytes);
	SLGO_CALL(slgoRemoteLength, remote, bytes);
}

int sluice_remote_close(sluice_remote remote) { SLGO_CALL(slgoRemoteClose, remote); }

int sluice_notify(sluice_peer peer, const void *message, size_t length, int64_t timeout_ns)
{
	SLGO_CALL(slgoNotify, peer, (uint8_t *)message, length, timeout_ns);
}

int sluice_receive(sluice_engine engine, struct sluice_notification *notification, void *buffer,
		   size_t capacity, int64_t timeout_ns)
{
	struct sluice_notification known = {0};
	int code = slgo_copy(&known, sizeof known, SLGO_THROUGH(struct sluice_notification, length),
			     notification, "sluice_notification");
	// what a newer program has room for is nothing that it sets
	if (code && code != SLUICE_ERR_VERSION)
		return code;
	SLGO_NEED(buffer || !capacity);
	SLGO_CALL(slgoReceive, engine, notification, buffer, capacity, timeout_ns);
}

int sluice_notification_fd(sluice_engine engine, int *fd)
{
	SLGO_NEED(fd);
	SLGO_CALL(slgoNotificationFd, engine, fd);
}

int sluice_explain(sluice_peer peer, sluice_region region, sluice_remote remote, uint32_t format,
		   void *buffer, size_t capacity, size_t *length)
{
	SLGO_NEED(length);
	SLGO_NEED(buffer || !capacity);
	SLGO_CALL(slgoExplain, peer, region, remote, format, buffer, capacity, length);
}
