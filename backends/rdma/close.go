// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"errors"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// aLongTimeAgo is a deadline that has passed.
var aLongTimeAgo = time.Unix(1, 0)

// Close implements driver.Backend. Peers are closed first, as Peer.Close does it, all at
// once; then memories, so that no peer reaches them; then what others have to us.
func (b *Backend) Close() error {
	b.closeOnce.Do(func() { b.closeErr = b.close() })
	return b.closeErr
}

func (b *Backend) close() error {
	b.gate.Shut()
	close(b.closing)
	b.gate.Wait()
	err := errors.Join(b.closePeers(), b.closeMemories())
	b.mu.Lock()
	accepted := b.accepted
	b.accepted = nil // peers that come now are turned away
	b.mu.Unlock()
	for c := range accepted {
		c.leave()
	}
	b.lobby.Close()
	for _, l := range b.listeners {
		err = errors.Join(err, l.Close())
	}
	b.tasks.Wait()
	b.deaf.Store(true)
	_ = b.control.Signal() // attend ends by it
	b.attending.Wait()
	err = errors.Join(err, b.release())
	b.ended.Store(true)
	return err
}

func (b *Backend) closePeers() error {
	b.mu.Lock()
	open := make([]*peer, 0, len(b.peers))
	for p := range b.peers {
		open = append(open, p)
	}
	b.mu.Unlock()
	var wg sync.WaitGroup
	errs := make([]error, len(open))
	for i, p := range open {
		wg.Go(func() { errs[i] = p.Close() })
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (b *Backend) closeMemories() error {
	var errs []error
	for _, m := range b.table.All() {
		errs = append(errs, m.revoke(context.Background()))
	}
	return errors.Join(errs...)
}

// release gives back what open made.
func (b *Backend) release() error {
	var errs []error
	if !b.gate.IsShut() { // open has failed
		for _, l := range b.listeners {
			errs = append(errs, l.Close())
		}
	}
	if b.net != nil {
		errs = append(errs, b.net.Close())
	}
	if b.control != nil {
		errs = append(errs, b.control.Close()) // nothing writes to it any more
	}
	if b.event >= 0 {
		errs = append(errs, unix.Close(b.event))
	}
	return errors.Join(errs...)
}
