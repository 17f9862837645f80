// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"encoding/binary"
	"net"
)

// appendView appends the two ends of a connection as one side sees them: the initiator's, then the
// owner's. With a welcome the owner says what it sees. If the initiator sees the same, then
// no proxy on the way ended the connection and began another: its end is a word
// of the owner's kernel, which says it once the owner has stopped all its readers, or is dead.
// One that was reset proves nothing: kernels do that by themselves, and give the reader what
// had come before. Nor does one under TLS, whose end can be made up on the way.
func appendView(b []byte, initiator, owner net.Addr) []byte {
	for _, a := range []net.Addr{initiator, owner} {
		at, ok := a.(*net.TCPAddr)
		if !ok {
			return b
		}
		ip := at.AddrPort().Addr().As16()
		b = binary.LittleEndian.AppendUint16(append(b, ip[:]...), uint16(at.Port))
	}
	return b
}
