// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
)

// Poll implements driver.Backend. It looks at memory that the workers share with
// us. A caller that finds nothing and comes again at once waits: it moves the workers itself,
// which saves waking their threads.
func (b *Backend) Poll(done []driver.Completion) (int, error) {
	ended := b.ended.Load() // before the look: what is found missing then is missing for good
	n := b.collect(done)
	if n == 0 && b.idle && !ended {
		b.drive()
		n = b.collect(done)
	}
	b.idle = n == 0
	if n == 0 && ended && len(done) > 0 {
		return 0, driver.ErrClosed
	}
	return n, nil
}

// collect takes what is in the rings, without a crossing into C.
func (b *Backend) collect(done []driver.Completion) (n int) {
	for n < len(done) {
		got := b.net.Poll(b.scratch[:min(len(b.scratch), len(done)-n)])
		if got == 0 {
			break
		}
		for _, d := range b.scratch[:got] {
			done[n] = driver.Completion{Tag: d.Tag, Err: ucp.Error(d)}
			n++
		}
	}
	return n
}

func (b *Backend) drive() {
	if b.used.Load() > 0 {
		b.net.Drive()
	}
}

// FD implements driver.Backend.
func (b *Backend) FD() int { return b.event }

// Arm implements driver.Backend.
func (b *Backend) Arm() (ready bool, err error) {
	if b.gate.IsShut() {
		return false, driver.ErrClosed
	}
	said := b.words.Arm()
	return b.net.Arm() || said, nil
}

// wake signals the event for news that is not in a ring of C.
func (b *Backend) wake() {
	if b.words.Disarm() {
		_, _ = unix.Write(b.event, one) // full only when it is signalled already
	}
}

// one is what a signal adds, in the byte order of this machine.
var one = binary.NativeEndian.AppendUint64(nil, 1)
