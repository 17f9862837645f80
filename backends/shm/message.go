// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// Messages of the control socket: one kind byte, then the body.
const (
	msgHello   = 1 + iota // dialer: its address; with connection page and event
	msgWelcome            // owner: the number of its keys; with key table and event
	msgFetch              // dialer: a token, of which it asks the extents
	msgExtents            // owner: those, a part at a time
	msgPing               // dialer: it wants a sign of life
	msgPong               // owner: that
)

// status is how the owner answers.
type status byte

const (
	statusOK status = iota
	statusRevoked
	statusBadToken
	statusVersion
	statusBounds
	statusFull
	statusFailed
)

var statusErrors = [...]error{
	statusOK: nil, statusRevoked: driver.ErrRevoked, statusBadToken: driver.ErrBadToken,
	statusVersion: driver.ErrVersion, statusBounds: driver.ErrBounds, statusFull: driver.ErrFull,
	statusFailed: driver.ErrCorrupt,
}

func statusError(s status) error {
	if int(s) >= len(statusErrors) {
		return driver.ErrCorrupt
	}
	return statusErrors[s]
}

// statusOf is the other way round.
func statusOf(err error) status {
	for s, e := range statusErrors {
		if e == nil && err == nil || e != nil && errors.Is(err, e) {
			return status(s)
		}
	}
	return statusFailed
}

// read returns the next message: its kind, the body, which is valid until the
// next call, and the descriptors, which are the caller's.
func (in *inbox) read() (kind byte, body []byte, fds []int, err error) {
	if err := in.next(); err != nil {
		return 0, nil, nil, err
	}
	fds, err = receivedFDs(in.oob[:in.hdr.Controllen])
	if err == nil && in.hdr.Flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = fmt.Errorf("message is cut: %w", driver.ErrCorrupt)
	}
	if err != nil {
		closeAll(fds)
		return 0, nil, nil, err
	}
	return in.buf[0], in.buf[1:in.n], fds, nil
}

func receivedFDs(oob []byte) ([]int, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("read descriptors: %w", err)
	}
	var fds []int
	for i := range msgs {
		got, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			continue // another kind of control message
		}
		fds = append(fds, got...)
	}
	return fds, nil
}

// send writes one message. The deadline bounds it when the other side is frozen
// and its buffer full.
func send(c *net.UnixConn, timeout time.Duration, msg []byte, fds []int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	if err := c.SetWriteDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	_, _, err := c.WriteMsgUnix(msg, oob, nil)
	_ = c.SetWriteDeadline(time.Time{}) // it would end later writes as well
	return err
}

// say sends to the owner; a socket that does not take it is a lost peer, which
// the reader of the socket finds out.
func (p *peer) say(msg []byte) {
	p.saying.Lock()
	defer p.saying.Unlock()
	if err := send(p.sock, p.b.cfg.DialTimeout, msg, nil); err != nil {
		_ = p.sock.Close()
	}
}
