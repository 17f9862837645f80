// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"fmt"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/internal/clock"
)

// Close implements driver.Peer. What has not begun ends at once, the rest is given
// Config.Grace. Then our queue pairs end, and the owner is told; its answer is the proof
// that its own have ended too, so that nothing of ours lands any more. For an owner that is
// silent for Config.Grace see proves.
//
// driver.ErrUnproven: a NIC keeps a queue pair of ours. The batches have not ended then, and
// Close may be called again.
func (p *peer) Close() error {
	p.ending.Lock()
	defer p.ending.Unlock()
	if !p.ended {
		p.ended = true
		p.end()
	}
	return p.giveBack()
}

// abandon is Close of a connection that the program does not get, beside. When the
// backend closes it does so itself.
func (p *peer) abandon() {
	p.unwanted.Store(true)
	p.b.tasks.Start(func() { _ = p.Close() })
}

func (p *peer) end() {
	p.gate.Shut()
	close(p.closing)
	p.gate.Wait()
	clean := true
	if !p.gone.Load() {
		clean = p.link.Drain(p.b.cfg.Grace) == nil
	}
	p.mender.stop()
	proved := clean
	if !p.gone.Load() {
		ended := p.endPairs()
		proved = p.part(p.lostCh) || clean || p.proves(ended)
	}
	p.losing.Do(func() { p.gone.Store(true); close(p.lostCh) })
	p.lostDone.Wait()
	_ = p.link.End(verbs.Closed, proved) // giveBack tries again
	p.ch.finish(p.b.cfg.Grace)
	p.ch.wait()
	p.running.Wait()
}

// part says goodbye and reports whether the owner has answered, in its time.
func (p *peer) part(stop <-chan struct{}) bool {
	p.ch.send((&bye{abandoned: p.unwanted.Load()}).encode())
	clock.Pass(p.b.cfg.clock, p.b.cfg.Grace, p.farewell, stop)
	return p.parted()
}

// proves reports whether nothing of ours lands at an owner that does not say so. The end of its
// control connection is no proof: its process may be there, and the kernel ends the queue pairs of
// one that was killed in its own time. ended says that our queue pairs are gone: then what was sent
// has landed or is lost once the fabric has had its time, if that is known.
func (p *peer) proves(ended bool) bool {
	life := p.b.cfg.PacketLife
	return ended && life > 0 && (clock.Pass(p.b.cfg.clock, life, p.farewell, nil) || p.parted())
}

// giveBack ends the use of the link, once no queue pair of it is left. Preconditions: p.ending is
// held.
func (p *peer) giveBack() error {
	if p.over {
		return nil
	}
	if err := p.link.End(verbs.Closed, false); err != nil {
		return fmt.Errorf("close peer: %w", err)
	}
	p.b.remove(p.link.ID())
	p.hold.Shut()
	p.hold.Wait()
	p.b.answers.forget(p)
	_ = p.link.Close() // it has ended
	p.b.mu.Lock()
	delete(p.b.peers, p)
	p.b.mu.Unlock()
	p.over = true
	return nil
}
