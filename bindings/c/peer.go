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

// peer is another engine, connected.
type peer struct {
	of *openEngine
	p  *engine.Peer

	mu    sync.Mutex
	known map[*engine.Remote]uint64 // handles
}

// remote is a region of a peer's, or a part that was leased to us.
type remote struct {
	of *peer
	m  *engine.Remote
}

// peerHandle returns the one handle that a peer has.
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

// senderHandle names the sender of a message: 0 for a peer that is over and that the program
// does not know, or no more.
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

// connected is how the functions that make a peer return.
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

// within is a context for a call that is not hot.
func within(timeout C.int64_t) (context.Context, context.CancelFunc) {
	if timeout < 0 {
		return context.Background(), func() {}
	}
	if timeout == 0 {
		return past, func() {}
	}
	return context.WithTimeout(context.Background(), time.Duration(timeout))
}

// past is over: a program that polls makes none for each call.
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

// forget makes the handles of a peer stale that is closed.
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

// found gives a remote its one handle.
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
