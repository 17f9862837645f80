// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// run leads a request from its first message to its outcome.
func (q *Request) run() {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	go func() { // whatever ends the request also ends its waits
		select {
		case <-q.stopped:
			cancel(q.end)
		case <-q.Peer.Lost():
			cancel(engine.ErrPeerLost)
		case <-q.r.closing:
			cancel(engine.ErrClosed)
		case <-ctx.Done():
		}
	}()
	err := q.lead(ctx)
	if err == nil {
		q.finish(nil)
		return
	}
	end := *endOf(ctx, q.ID, err)
	end.Request = q.ID // was not known to the side that asked for the end
	q.finish(&end)
}

// lead returns nil when the request is complete.
func (q *Request) lead(ctx context.Context) error {
	idle := time.NewTimer(q.r.cfg.IdleTimeout)
	defer idle.Stop()
	if err := q.await(ctx, q.begun, idle); err != nil {
		return err
	}
	ask, err := decodeBegin(q.asked.bytes)
	if err != nil {
		return err
	}
	q.ID, q.Hashes = ask.request, ask.hashes
	if ask.fingerprint != q.r.cfg.Geometry.Fingerprint() {
		return fmt.Errorf("this side has %d layers of %d bytes: %w", q.r.cfg.Geometry.Layers(),
			q.r.cfg.Geometry.LayerBytes(), ErrGeometry)
	}
	places, err := q.acquire(ctx)
	if err != nil {
		return err
	}
	q.r.queue(q)
	err = sendFragments(ctx, q.Peer, toSender, kindGrant, q.session, appendGrant(nil, places),
		q.r.cfg.MessageMax)
	if err != nil {
		return fmt.Errorf("grant: %w", err)
	}
	idle.Reset(q.r.cfg.IdleTimeout)
	return q.await(ctx, q.complete, idle)
}

// await waits for an event as long as the sender gives signs of life.
func (q *Request) await(ctx context.Context, event chan struct{}, idle *time.Timer) (err error) {
	for err == nil {
		select {
		case <-event:
			return nil
		case <-q.alive:
			idle.Reset(q.r.cfg.IdleTimeout)
		case <-idle.C:
			err = fmt.Errorf("no sign of life of the sender for %v: %w", q.r.cfg.IdleTimeout,
				engine.ErrTimeout)
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	if isClosed(event) { // at the same moment
		return nil
	}
	return err
}

// acquire takes the blocks and leases the missing ones out.
func (q *Request) acquire(ctx context.Context) ([]place, error) {
	room, cancel := context.WithTimeoutCause(ctx, q.r.cfg.RoomTimeout, engine.ErrTimeout)
	defer cancel()
	grant, err := q.r.cfg.Pool.Acquire(room, q.Hashes)
	if err != nil {
		return nil, err
	}
	q.grant, q.Blocks, q.Missing = grant, grant.Blocks, grant.Missing
	places := make([]place, 0, len(grant.Missing))
	for _, at := range grant.Missing {
		where, err := q.r.cfg.Geometry.Block(uint64(grant.Blocks[at]))
		if err != nil {
			return nil, err
		}
		lease, err := q.r.cfg.Region.Lease(where.Off, where.Len, engine.LeaseOptions{})
		if err != nil {
			return nil, fmt.Errorf("lease block %d out: %w", grant.Blocks[at], err)
		}
		q.leases = append(q.leases, lease)
		token := lease.Token()
		if len(token) > tokenMax {
			return nil, fmt.Errorf("lease block %d out: a token of %d bytes, at most %d: %w",
				grant.Blocks[at], len(token), tokenMax, engine.ErrBounds)
		}
		places = append(places, place{at, token})
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.granted = true
	if len(places) == 0 { // all of it is here
		for l := range q.arrived {
			q.layers <- l
		}
		q.absent = 0
	}
	return places, nil
}

// finish revokes the leases, and only then gives the blocks to their owner
// now. The sender is told last.
func (q *Request) finish(end *EndError) {
	if !q.revoke() {
		if end == nil {
			end = &EndError{Request: q.ID, Reason: Failed}
		}
		end.Err = errors.Join(end.Err, errStuck)
	}
	q.settle(end)
	q.r.forget(q.session)
	close(q.closed)
	switch {
	case end == nil:
		q.r.tell(q.Peer, q.session, kindTaken, 0)
	case !end.Remote && end.Reason != PeerLost:
		q.r.tell(q.Peer, q.session, kindEnd, end.Reason)
	}
}

// settle notes the outcome and gives the blocks to the request or to the pool.
func (q *Request) settle(end *EndError) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.finished = true
	close(q.layers)
	if end != nil {
		end.Peer = q.Peer.Name()
		q.err = end
		q.r.count.ended(end.Reason)
	} else {
		for _, at := range q.Missing {
			q.grant.Publish(at)
		}
		q.count()
	}
	if q.grant != nil && (end != nil || q.released) {
		q.grant.Release()
	}
}

func (q *Request) count() {
	c := &q.r.count
	c.finished.Add(1)
	c.moved.Add(uint64(len(q.Missing)))
	c.reused.Add(uint64(len(q.Blocks) - len(q.Missing)))
	c.bytes.Add(uint64(len(q.Missing)) * q.r.cfg.Geometry.BlockBytes())
}
