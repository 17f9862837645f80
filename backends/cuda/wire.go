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

// Two processes exchange packets over a Unix socket. A packet is a head and its tail; it may carry
// a file descriptor. The process that wants to import memory dials:
//
//	hello    importer: its Addr, and the page in which it counts batches by slot
//	welcome  owner: the page with the state of each slot
//	ask      importer: a token
//	answer   owner: a slot and the memory, or an error
//	drop     importer: gives back a slot
//	ended    owner: the state of some slot has changed, look at the page
//	bye      importer: none of its batches runs any more
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
	protocol    = 1
	slotsMax    = 4096 // most imports over one connection
	pageBytes   = 8 * slotsMax
	packetMax   = 4 << 10
	peersPrefix = "cuda1:" // prefix of an Addr that other processes can reach
)

// head is the fixed part of a packet.
type head struct {
	Kind, Version, Outcome, ReadOnly uint8
	ID, Slot                         uint32
	// Block is the number of the owner's physical memory. renew, which replaces it, gives a new
	// one.
	Block             uint64
	Mapped, Off, Size uint64 // bytes of the block; offset and size of the memory in it
	Device            [16]byte
}

var headBytes = binary.Size(head{})

// outcomes are the errors that an owner can send, by number.
var outcomes = [...]error{nil, driver.ErrBadToken, driver.ErrRevoked, driver.ErrNotSupported,
	driver.ErrFull, driver.ErrClosed, driver.ErrVersion}

// outcomeOf returns the number of an error.
func outcomeOf(err error) uint8 {
	for i, o := range outcomes {
		if errors.Is(err, o) {
			return uint8(i)
		}
	}
	return uint8(len(outcomes))
}

// outcome returns the error in an answer, or nil. text is the owner's explanation.
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

// wire sends and receives packets over a socket. Only one goroutine may receive at a time.
type wire struct {
	conn *net.UnixConn
	buf  [packetMax]byte
	oob  [256]byte
}

// send sends a packet. It blocks for limit at most, if the other process does not read.
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

// receive returns a packet. The tail is valid until the next call. The caller must close fd; -1:
// none.
func (w *wire) receive() (h head, tail []byte, fd int, err error) {
	n, oobn, flags, _, err := w.conn.ReadMsgUnix(w.buf[:], w.oob[:])
	if err == nil && n == 0 {
		err = io.EOF
	}
	fd, fdErr := descriptorIn(w.oob[:oobn])
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

// descriptorIn returns the file descriptor in the control messages of a packet, or -1. More than
// one is an error, and all but the first are closed.
func descriptorIn(oob []byte) (fd int, err error) {
	if len(oob) == 0 {
		return -1, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return -1, fmt.Errorf("descriptors: %w", driver.ErrCorrupt)
	}
	fd = -1
	for i := range msgs {
		list, _ := unix.ParseUnixRights(&msgs[i]) // other control messages contain none
		for _, got := range list {
			unix.CloseOnExec(got)
			if fd >= 0 {
				closeDescriptor(got)
				err = fmt.Errorf("more than one descriptor: %w", driver.ErrCorrupt)
				continue
			}
			fd = got
		}
	}
	return fd, err
}

func closeDescriptor(fd int) {
	if fd >= 0 {
		_ = unix.Close(fd) // cannot lose data
	}
}

// newAddress makes the Addr of a backend. Its prefix says whether other processes can reach it.
func newAddress(c *Config) string {
	if !c.Peers {
		return "cuda:" + rand.Text()
	}
	return peersPrefix + strconv.Itoa(os.Getuid()) + ":" + rand.Text()
}

// socketOf returns the address to listen on and to dial: an abstract Unix socket.
func socketOf(addr []byte) (*net.UnixAddr, error) {
	rest, hasPrefix := bytes.CutPrefix(addr, []byte(peersPrefix))
	user, name, hasName := strings.Cut(string(rest), ":")
	uid, err := strconv.ParseUint(user, 10, 32)
	if !hasPrefix || !hasName || err != nil || len(name) != len(rand.Text()) ||
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
