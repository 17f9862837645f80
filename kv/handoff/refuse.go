// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// notify sends a message without a body. Where it cannot be sent within limit, the limits of the
// other side end the request there.
func notify(p *engine.Peer, limit time.Duration, to byte, what kind, reason Reason,
	session uint64) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	_ = p.Notify(ctx, appendHeader(nil, to, what, reason, session))
}

// refusals are the requests that a receiver turns away. A goroutine tells their senders, since the
// handler of a Mux must not wait. Where too many are to be told, the senders' own limits end their
// wait.
type refusals struct {
	to    byte          // the first byte of a message to the senders
	limit time.Duration // for one to be told
	list  chan refusal
	count *counters
}

type refusal struct {
	peer    *engine.Peer
	session uint64
	reason  Reason
}

func (r *refusals) add(p *engine.Peer, session uint64, reason Reason) {
	r.count.ended(reason)
	select {
	case r.list <- refusal{p, session, reason}:
	default:
	}
}

// run tells senders until the receiver is closed.
func (r *refusals) run(closing <-chan struct{}) {
	for {
		select {
		case f := <-r.list:
			notify(f.peer, r.limit, r.to, kindEnd, f.reason, f.session)
		case <-closing:
			return
		}
	}
}

// drain tells the rest, at once. Precondition: add is not called any more.
func (r *refusals) drain() {
	var all sync.WaitGroup
	defer all.Wait()
	for {
		select {
		case f := <-r.list:
			all.Go(func() { notify(f.peer, r.limit, r.to, kindEnd, f.reason, f.session) })
		default:
			return
		}
	}
}
