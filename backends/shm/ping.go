// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"sync"

	"github.com/sluicehq/sluice/internal/clock"
)

// ping tells an owner that is frozen from one whose program does not take its
// notifications. Both leave the ring full, and a program may take its time; but the
// goroutine that reads the owner's socket answers as long as the process runs.
type ping struct {
	mu    sync.Mutex
	sent  int64       // 0: never
	timer clock.Timer // nil: none is under way
}

// suspect asks the owner for a sign of life, because its ring is full. One that gives none
// within Config.Failure is lost: no notification would reach it, and the engine's
// operations would wait for room without limit. Bytes would.
// Preconditions: entered.
func (p *peer) suspect() {
	p.ping.mu.Lock()
	defer p.ping.mu.Unlock()
	now := p.b.clock.Now()
	again := p.ping.sent != 0 && now-p.ping.sent < int64(p.b.cfg.Failure/4)
	if p.self || p.ping.timer != nil || again {
		return
	}
	p.ping.sent = now
	p.ping.timer = p.b.clock.AfterFunc(p.b.cfg.Failure, func() {
		_ = p.sock.Close() // the reader ends by it, and the peer is lost
	})
	p.readerWG.Go(func() { p.say([]byte{msgPing}) })
}

// alive ends the ping under way.
func (p *peer) alive() {
	p.ping.mu.Lock()
	defer p.ping.mu.Unlock()
	if p.ping.timer != nil {
		p.ping.timer.Stop()
		p.ping.timer = nil
	}
}
