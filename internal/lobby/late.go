// SPDX-License-Identifier: Apache-2.0

package lobby

import (
	"errors"
	"io"
	"slices"
	"syscall"
	"time"
)

// Between tries to connect to a listener that was late there is a pause, which grows.
const PauseMin, PauseMax = 20 * time.Millisecond, time.Second

// Meant is within what time a connection ends that the other side does not want: a program that
// is not ours, say. One that was late has a limit, which is longer.
const Meant = 250 * time.Millisecond

// Late reports whether a handshake that failed after a time may do better when it is tried again:
// the other side hung up without a word, since it was late itself.
func Late(err error, after time.Duration) bool {
	return after >= Meant && slices.ContainsFunc([]error{io.EOF, io.ErrUnexpectedEOF,
		syscall.ECONNRESET, syscall.EPIPE}, func(is error) bool { return errors.Is(err, is) })
}
