// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"context"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// peer is the object of a peer handle: a connected engine.
type peer struct {
	of *openEngine
	p  *engine.Peer

	mu    sync.Mutex
	known map[*engine.Remote]uint64 // handles
}

// remote is the object of a remote handle: a region of a peer, or a range that the peer has leased
// to this engine.
type remote struct {
	of *peer
	m  *engine.Remote
}

// peerHandle returns the handle of a peer. A peer has only one.
func (e *openEngine) peerHandle(p *engine.Peer) (uint64, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if h, ok := e.known[p]; ok {
		return h, nil
	}
	if e.over {
		return 0, engine.ErrClosed
	}
	h, err := peers.put(&peer{of: e, p: p, known: map[*engine.Remote]uint64{}})
	if err == nil {
		e.known[p] = h
	}
	return h, err
}

// senderHandle returns the handle of a message's sender. It is 0 for a lost peer for which the
// program has no handle, or has none any more.
func (e *openEngine) senderHandle(p *engine.Peer) uint64 {
	e.mu.Lock()
	h, known := e.known[p]
	e.mu.Unlock()
	if known {
		return h
	}
	select {
	case <-p.Lost():
		return 0
	default:
	}
	h, _ = e.peerHandle(p) // 0 when there are no more
	return h
}

// connected is the end of the functions that make a peer: it writes the peer's handle to out, or
// closes the peer on an error.
func (e *openEngine) connected(p *engine.Peer, err error, out *C.uint64_t,
	f *C.struct_slgo_fault) C.int {
	if err != nil {
		return answer(f, err)
	}
	h, err := e.peerHandle(p)
	if err != nil {
		_ = p.Close()
		return answer(f, err)
	}
	*out = C.uint64_t(h)
	return C.SLUICE_OK
}

// within returns a context with a timeout. It allocates, so it is not for frequent calls.
func within(timeout C.int64_t) (context.Context, context.CancelFunc) {
	if timeout < 0 {
		return context.Background(), func() {}
	}
	if timeout == 0 {
		return past, func() {}
	}
	return context.WithTimeout(context.Background(), time.Duration(timeout))
}

// past is a context that has ended, for a timeout of 0: a program that polls allocates no context
// for each call.
var past = func() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 0)
	cancel()
	return ctx
}()

//export slgoDescribe
func slgoDescribe(h C.uint64_t, list *C.uint64_t, count C.size_t, buffer *C.uint8_t,
	capacity C.size_t, length *C.size_t, f *C.struct_slgo_fault) C.int {
	e, err := engines.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	handles, err := inPlace[uint64](list, uint64(count), "regions")
	if err != nil {
		return answer(f, err)
	}
	named := make([]*engine.Region, 0, min(len(handles), 1<<16))
	for _, h := range handles {
		r, err := regions.get(h)
		switch {
		case err != nil:
			return answer(f, err)
		case r.of != e:
			return answer(f, argument("region %#x belongs to another engine", h))
		}
		named = append(named, r.r)
	}
	b, err := e.Describe(named...)
	if err != nil {
		return answer(f, err)
	}
	return hand(b, buffer, capacity, length, f)
}

//export slgoConnect
func slgoConnect(h C.uint64_t, description *C.uint8_t, length C.size_t, timeout C.int64_t,
	out *C.uint64_t, f *C.struct_slgo_fault) C.int {
	e, err := engines.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	b, err := inPlace[byte](description, uint64(length), "description")
	if err != nil {
		return answer(f, err)
	}
	ctx, cancel := within(timeout)
	defer cancel()
	p, err := e.Connect(ctx, append([]byte(nil), b...)) // a Remote keeps its token
	return e.connected(p, err, out, f)
}

//export slgoSelf
func slgoSelf(h C.uint64_t, out *C.uint64_t, f *C.struct_slgo_fault) C.int {
	e, err := engines.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	p, err := e.Self()
	return e.connected(p, err, out, f)
}

//export slgoDial
func slgoDial(h C.uint64_t, network, address *C.char, timeout C.int64_t, out *C.uint64_t,
	f *C.struct_slgo_fault) C.int {
	e, err := engines.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	if err := checkNetwork(C.GoString(network)); err != nil {
		return answer(f, err)
	}
	ctx, cancel := within(timeout)
	defer cancel()
	p, err := e.Dial(ctx, C.GoString(network), C.GoString(address))
	return e.connected(p, err, out, f)
}

//export slgoPeerLost
func slgoPeerLost(h C.uint64_t, lost *C.int, f *C.struct_slgo_fault) C.int {
	p, err := peers.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	*lost = isClosed(p.p.Lost())
	return C.SLUICE_OK
}

//export slgoPeerRefresh
func slgoPeerRefresh(h C.uint64_t, description *C.uint8_t, length C.size_t,
	f *C.struct_slgo_fault) C.int {
	p, err := peers.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	b, err := inPlace[byte](description, uint64(length), "description")
	if err == nil {
		err = p.p.Refresh(append([]byte(nil), b...))
	}
	return answer(f, err)
}

//export slgoPeerClose
func slgoPeerClose(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	p, err := peers.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	err = p.p.Close()
	p.forget(uint64(h))
	return answer(f, err)
}

// forget drops the handles of a closed peer and of its remotes.
func (p *peer) forget(h uint64) {
	p.of.mu.Lock()
	delete(p.of.known, p.p)
	p.of.mu.Unlock()
	peers.drop(h)
	remotes.dropAll(func(r *remote) bool { return r.of == p })
}

//export slgoRemoteFind
func slgoRemoteFind(h C.uint64_t, name *C.char, out *C.uint64_t, f *C.struct_slgo_fault) C.int {
	p, err := peers.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	m, err := p.p.Remote(C.GoString(name))
	return p.found(m, err, out, f)
}

//export slgoRemoteImport
func slgoRemoteImport(h C.uint64_t, token *C.uint8_t, length C.size_t, out *C.uint64_t,
	f *C.struct_slgo_fault) C.int {
	p, err := peers.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	b, err := inPlace[byte](token, uint64(length), "token")
	if err != nil {
		return answer(f, err)
	}
	m, err := p.p.Import(append([]byte(nil), b...))
	return p.found(m, err, out, f)
}

// found writes the handle of a remote to out. A remote has only one.
func (p *peer) found(m *engine.Remote, err error, out *C.uint64_t, f *C.struct_slgo_fault) C.int {
	if err != nil {
		return answer(f, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	h, ok := p.known[m]
	if !ok {
		if h, err = adopt(p.of, &remotes, &remote{of: p, m: m}); err != nil {
			return answer(f, err)
		}
		p.known[m] = h
	}
	*out = C.uint64_t(h)
	return C.SLUICE_OK
}

//export slgoRemoteLength
func slgoRemoteLength(h C.uint64_t, bytes *C.uint64_t, f *C.struct_slgo_fault) C.int {
	m, err := remotes.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	*bytes = C.uint64_t(m.m.Size())
	return C.SLUICE_OK
}

//export slgoRemoteClose
func slgoRemoteClose(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	m, err := remotes.get(uint64(h))
	if err == nil {
		err = m.m.Close()
	}
	if err != nil {
		return answer(f, err)
	}
	m.of.mu.Lock()
	delete(m.of.known, m.m)
	m.of.mu.Unlock()
	remotes.drop(uint64(h))
	return C.SLUICE_OK
}
