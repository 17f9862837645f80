// SPDX-License-Identifier: Apache-2.0

package byname

import (
	"fmt"

	"github.com/sluicehq/sluice/backends/cuda"
	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/backends/tcp"
	gather "github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/identity"
)

// Each type in this file is the set of options of a backend: the exported fields of the backend's
// Config, and options for settings that a Config does not hold as text or numbers.

// TCP is the options of backend tcp.
type TCP struct {
	Certificate, Key string // PEM files: the certificate of this side, and its private key
	Authority        string // PEM file: the authorities that sign the peers' certificates
	// name that the certificate of a dialled peer must have; empty: any name
	ServerName string
	tcp.Config
}

// Member is who this side is by its certificate; nil: the options name none.
func (s *TCP) Member() (*identity.Identity, error) {
	secure := s.Certificate != "" || s.Key != "" || s.Authority != "" || s.ServerName != ""
	switch {
	case secure && s.Plaintext:
		return nil, Errorf("options plaintext and certificate: want one of them")
	case secure && (s.Certificate == "" || s.Key == "" || s.Authority == ""):
		return nil, Errorf("options certificate, key and authority go together: TLS is " +
			"spoken by both sides")
	case !secure:
		return nil, nil
	}
	id, err := identity.FromFiles(s.Certificate, s.Key, s.Authority)
	if err != nil {
		return nil, fmt.Errorf("options certificate, key and authority: %w", err)
	}
	if s.ServerName != "" {
		id = id.CheckName(s.ServerName)
	}
	return id, nil
}

func newTCP(s TCP) (*tcp.Backend, error) {
	id, err := s.Member()
	if err != nil {
		return nil, err
	}
	if id != nil {
		s.Identity = id
	}
	return tcp.New(s.Config)
}

type posixSettings struct {
	Path string // "ring" or "threads"; empty: what the kernel allows
	posix.Config
}

func newPosix(s posixSettings) (*posix.Backend, error) {
	paths := map[string]posix.Path{"": posix.PathAuto, "ring": posix.PathRing,
		"threads": posix.PathThreads}
	path, ok := paths[s.Path]
	if !ok {
		return nil, Errorf("option path=%s: there are ring and threads", s.Path)
	}
	s.Config.Path = path
	return posix.New(s.Config)
}

type cudaSettings struct {
	SMs int // multiprocessors that the gather kernel may use
	cuda.Config
}

func newCUDA(s cudaSettings) (*cuda.Backend, error) {
	s.Budget = gather.Budget{SMs: s.SMs}
	return cuda.New(s.Config)
}
