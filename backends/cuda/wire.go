// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// Between processes there is a socket, with a message in each packet: a head, and what follows it.
// Descriptors travel beside. The process that wants memory of the other one dials:
//
//	hello    its Addr, and the page in which it counts batches by slot
//	welcome  the page in which the owner ends slots
//	ask      a token
//	answer   a slot, and the memory, or why not
//	drop     a slot
//	ended    look at the slots: one has ended; a hint
//	bye      nothing is under way any more
const (
	sayHello = iota + 1
	sayWelcome
	sayAsk
	sayAnswer
	sayDrop
	sayEnded
	sayBye
)

const (
	protocol   = 1
	slotsMax   = 4096 // imports of a connection
	pageBytes  = 8 * slotsMax
	packetMax  = 4 << 10
	soleMarker = "cuda1:" // of an Addr that other processes reach
)

// head begins a packet.
type head struct {
	Kind, Version, Outcome, ReadOnly uint8
	ID, Slot                         uint32
	// which memory of the owner's it is; another one has another number
	Block             uint64
	Mapped, Off, Size uint64 // bytes of the block, and where in it the memory lies
	Device            [16]byte
}

var headBytes = binary.Size(head{})

// outcomes are what an owner answers, by number.
var outcomes = [...]error{nil, driver.ErrBadToken, driver.ErrRevoked, driver.ErrNotSupported,
	driver.ErrFull, driver.ErrClosed, driver.ErrVersion}

// outcomeOf finds the number of an error.
func outcomeOf(err error) uint8 {
	for i, o := range outcomes {
		if errors.Is(err, o) {
			return uint8(i)
		}
	}
	return uint8(len(outcomes))
}

// outcome is an answer as an error.
func (h *head) outcome(text []byte) error {
	switch {
	case h.Outcome == 0:
		return nil
	case int(h.Outcome) < len(outcomes) && len(text) == 0:
		return outcomes[h.Outcome]
	case int(h.Outcome) < len(outcomes):
		return fmt.Errorf("%s: %w", text, outcomes[h.Outcome])
	}
	return fmt.Errorf("the other process refuses: %q", text)
}

// wire is a socket and the packets on it. Receiving is for one goroutine at a time.
type wire struct {
	conn *net.UnixConn
	buf  [packetMax]byte
	oob  [256]byte
}

// send takes the time of one packet of a frozen process at most.
func (w *wire) send(h *head, tail []byte, limit time.Duration, fds ...int) error {
	h.Version = protocol
	packet, err := binary.Append(nil, binary.LittleEndian, h)
	if err != nil {
		return err
	}
	packet = append(packet, tail...)
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	if err := w.conn.SetWriteDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	_, _, err = w.conn.WriteMsgUnix(packet, oob, nil)
	return err
}

// receive returns a packet; its tail is good until the next. fd is the caller's to close, -1: none.
func (w *wire) receive() (h head, tail []byte, fd int, err error) {
	n, oobn, flags, _, err := w.conn.ReadMsgUnix(w.buf[:], w.oob[:])
	if err == nil && n == 0 {
		err = io.EOF
	}
	fd, fdErr := theDescriptor(w.oob[:oobn])
	switch {
	case err != nil:
	case fdErr != nil:
		err = fdErr
	case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 || n < headBytes:
		err = fmt.Errorf("packet of %d bytes: %w", n, driver.ErrCorrupt)
	default:
		_, err = binary.Decode(w.buf[:headBytes], binary.LittleEndian, &h)
	}
	if err == nil && h.Version != protocol {
		err = fmt.Errorf("the other process speaks version %d, we %d: use the same release on "+
			"both sides: %w", h.Version, protocol, driver.ErrVersion)
	}
	if err != nil {
		closeDescriptor(fd)
		return h, nil, -1, err
	}
	return h, w.buf[headBytes:n], fd, nil
}

// theDescriptor takes what came beside a packet: one or none.
func theDescriptor(oob []byte) (fd int, err error) {
	if len(oob) == 0 {
		return -1, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return -1, fmt.Errorf("descriptors: %w", driver.ErrCorrupt)
	}
	fd = -1
	for i := range msgs {
		list, _ := unix.ParseUnixRights(&msgs[i]) // what is no right has none
		for _, one := range list {
			unix.CloseOnExec(one)
			if fd >= 0 {
				closeDescriptor(one)
				err = fmt.Errorf("more than one descriptor: %w", driver.ErrCorrupt)
				continue
			}
			fd = one
		}
	}
	return fd, err
}

func closeDescriptor(fd int) {
	if fd >= 0 {
		_ = unix.Close(fd) // nothing was written to it
	}
}

// newAddress names a backend; other processes reach only that which says so.
func newAddress(c *Config) string {
	if !c.Peers {
		return "cuda:" + rand.Text()
	}
	return soleMarker + strconv.Itoa(os.Getuid()) + ":" + rand.Text()
}

// socketOf returns the name to listen on and to dial: an abstract one, of no directory.
func socketOf(addr []byte) (*net.UnixAddr, error) {
	rest, ok := bytes.CutPrefix(addr, []byte(soleMarker))
	user, name, both := strings.Cut(string(rest), ":")
	uid, err := strconv.ParseUint(user, 10, 32)
	if !ok || !both || err != nil || len(name) != len(rand.Text()) ||
		strings.ContainsFunc(name, func(r rune) bool {
			return r <= ' ' || r > '~'
		}) {
		return nil, fmt.Errorf("%.80q is no backend of this process, and none that another has "+
			"opened with Config.Peers: %w", addr, driver.ErrPeerLost)
	}
	if uid != uint64(os.Getuid()) {
		return nil, fmt.Errorf("the other process runs as uid %d, we as %d: run both as "+
			"one user: %w", uid, os.Getuid(), os.ErrPermission)
	}
	return &net.UnixAddr{Name: "@sluice-cuda-" + name, Net: "unixpacket"}, nil
}
