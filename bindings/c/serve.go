// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"context"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// listener is the object of a listener handle. It exchanges descriptions with peers that dial.
type listener struct {
	of    *openEngine
	stop  context.CancelFunc
	ended chan struct{}
}

// checkNetwork returns an error for a network that sluice.h does not list.
func checkNetwork(network string) error {
	if network != "unix" && network != "tcp" {
		return argument("network %q: there are unix and tcp", network)
	}
	return nil
}

// allowed returns an error if the engine cannot serve on a network. Engine.Serve itself
// would report that only later, and not to the caller.
func (e *openEngine) allowed(network string) error {
	if network == "unix" || e.speaks {
		return nil
	}
	return argument("network %q: open the engine with certificates, or in plaintext where the "+
		"network is trusted", network)
}

//export slgoServe
func slgoServe(h C.uint64_t, network, address *C.char, bound *C.uint8_t, capacity C.size_t,
	out *C.uint64_t, f *C.struct_slgo_fault) C.int {
	e, err := engines.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	if err := checkNetwork(C.GoString(network)); err != nil {
		return answer(f, err)
	}
	if err := e.allowed(C.GoString(network)); err != nil {
		return answer(f, err)
	}
	nl, err := engine.Listen(C.GoString(network), C.GoString(address))
	if err != nil {
		return answer(f, fmt.Errorf("serve: %w", err))
	}
	if bound != nil {
		var length C.size_t
		if code := hand([]byte(nl.Addr().String()+"\x00"), bound, capacity, &length,
			f); code != C.SLUICE_OK {
			_ = nl.Close()
			return code
		}
	}
	ctx, stop := context.WithCancel(context.Background())
	l := &listener{of: e, stop: stop, ended: make(chan struct{})}
	handle, err := adopt(e, &listeners, l)
	if err != nil {
		stop()
		_ = nl.Close()
		return answer(f, err)
	}
	go func() {
		defer close(l.ended)
		// ends with the listener or the engine; dialers are told what went wrong
		_ = e.Serve(ctx, nl)
	}()
	*out = C.uint64_t(handle)
	return C.SLUICE_OK
}

//export slgoListenerClose
func slgoListenerClose(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	l, err := listeners.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	l.stop()
	<-l.ended
	listeners.drop(uint64(h))
	return C.SLUICE_OK
}

// welcome waits until the program accepts a peer that came through Serve. If the peer is lost or
// the engine closes before, it closes the peer and drops its handle.
func (e *openEngine) welcome(p *engine.Peer) {
	select {
	case e.accepts <- p:
		return
	case <-p.Lost():
	case <-e.gone:
	}
	_ = p.Close()
	e.mu.Lock()
	h, known := e.known[p]
	e.mu.Unlock()
	if !known {
		return
	}
	if its, err := peers.get(h); err == nil { // a message of it has named it
		its.forget(h)
	}
}

// after returns a channel that receives when the time is over. For SLUICE_FOREVER the channel is
// nil and never does.
func after(timeout C.int64_t) (over <-chan time.Time, stop func()) {
	if timeout < 0 {
		return nil, func() {}
	}
	t := time.NewTimer(time.Duration(timeout))
	return t.C, func() { t.Stop() }
}

//export slgoAccept
func slgoAccept(h C.uint64_t, timeout C.int64_t, out *C.uint64_t, f *C.struct_slgo_fault) C.int {
	e, err := engines.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	select {
	case p := <-e.accepts:
		return e.connected(p, nil, out, f)
	default:
	}
	if timeout == 0 {
		return C.SLUICE_PENDING
	}
	over, stop := after(timeout)
	defer stop()
	select {
	case p := <-e.accepts:
		return e.connected(p, nil, out, f)
	case <-over:
		return C.SLUICE_PENDING
	case <-e.gone:
		return answer(f, fmt.Errorf("accept: the engine was closed: %w", engine.ErrClosed))
	}
}
