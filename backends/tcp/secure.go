// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"net"
)

// call secures a connection that we began, to a place of its owner's.
func (b *Backend) call(ctx context.Context, tcp net.Conn, place string) (net.Conn, error) {
	if b.secure == nil {
		return tcp, nil
	}
	host, _, err := net.SplitHostPort(place)
	if err != nil {
		host = place
	}
	return b.secure.Call(ctx, tcp, host)
}

// answer secures a connection that a peer began.
func (b *Backend) answer(ctx context.Context, tcp net.Conn) (net.Conn, error) {
	if b.secure == nil {
		return tcp, nil
	}
	return b.secure.Answer(ctx, tcp)
}

// refusal says why the owner hung up in place of a welcome: it may have refused our
// certificate.
func (b *Backend) refusal(err error, tcp net.Conn) error {
	if b.secure == nil {
		return err
	}
	host, _, splitErr := net.SplitHostPort(tcp.RemoteAddr().String())
	if splitErr != nil {
		host = tcp.RemoteAddr().String()
	}
	return b.secure.Explain(err, host)
}
