// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/internal/authority"
)

func newKeys() *cobra.Command {
	c := &cobra.Command{
		Use:   "keys",
		Short: "Make certificates by which peers know each other, for tests and small clusters",
		Long: `Make a certificate authority in a directory, and certificates of members. A program
with a certificate of the authority is a peer; a person with its key makes members of
others, so the directory stays where it was made and members get three files each.
Keys are ECDSA on P-256, in files that only their owner reads.`,
		Example: `  sluice keys init ca
  sluice keys issue ca decode-0 --host decode-0.example --host 10.0.0.2
  sluice agent --listen 10.0.0.2:7000 --cert ca/decode-0.pem --key ca/decode-0-key.pem --ca ca/ca.pem --region kv=1GiB
  sluice keys revoke ca decode-0`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newKeysInit(), newKeysIssue(), newKeysRevoke())
	return c
}

// validity is a flag for how long a certificate is good.
func validity(c *cobra.Command, valid *time.Duration, days int) {
	c.Flags().DurationVar(valid, "validity", time.Duration(days)*24*time.Hour,
		"for how long it is valid, from now on, such as 720h")
}

// validityMax keeps dates within what certificates can say (RFC 5280: four digits of a year).
const validityMax = 100 * 8760 * time.Hour

func checkValidity(valid time.Duration) error {
	if valid <= 0 || valid > validityMax {
		return usagef("--validity %v: want more than 0, and at most %v", valid, validityMax)
	}
	return nil
}

// failure is a usage error where words of the command line are to blame.
func failure(err error) error {
	if errors.Is(err, driver.ErrBounds) || errors.Is(err, driver.ErrBusy) ||
		errors.Is(err, os.ErrExist) || errors.Is(err, os.ErrNotExist) {
		return &usageError{err}
	}
	return err
}

func newKeysInit() *cobra.Command {
	var name string
	var valid time.Duration
	var force, asJSON bool
	c := &cobra.Command{
		Use:   "init DIR",
		Short: "Make an authority in a directory, which is made as well",
		Args:  words("a directory"),
		RunE: func(c *cobra.Command, args []string) error {
			if err := checkValidity(valid); err != nil {
				return err
			}
			dir := args[0]
			if name == "" {
				// two authorities must not share a name: errors could not tell them apart
				name = "sluice " + strings.ToLower(rand.Text()[:6])
			}
			cert, key := filepath.Join(dir, authority.CertFile),
				filepath.Join(dir, authority.KeyFile)
			a, pair, err := authority.New(name, valid)
			if err == nil {
				err = os.MkdirAll(dir, 0o700)
			}
			if err == nil {
				err = authority.Store(pair, cert, key, force)
			}
			if err != nil {
				return failure(err)
			}
			id, until := identity.KeyName(a.Cert().SubjectKeyId), a.Cert().NotAfter
			if asJSON {
				return printJSON(c.OutOrStdout(), initOutput{name, id, until, cert, key})
			}
			return tellf(c.OutOrStdout(), `authority %q (key %s), valid until %s
  %s  its certificate: every member needs it
  %s  its key: it stays here; it makes members
next: sluice keys issue %s NAME --host ADDRESS
`, name, id, day(until), cert, key, quoted(dir))
		},
	}
	c.Flags().StringVar(&name, "name", "", "what the authority is called in certificates, and in "+
		"errors; without it sluice and six random letters")
	validity(c, &valid, 3650)
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	c.Flags().BoolVar(&force, "force", false, "replace an authority that is there: certificates "+
		"of its members are worth nothing then")
	return c
}

func newKeysIssue() *cobra.Command {
	m := authority.Member{}
	var force, asJSON bool
	c := &cobra.Command{
		Use:   "issue DIR NAME",
		Short: "Issue a certificate for a member, with its key",
		Long: `Issue a certificate for a member, with its key, by the authority of a directory. It is for
both sides of a connection. Hosts are what --check-host compares with what was dialled.
A running agent takes files that are replaced at its next handshake.`,
		Args: words("the authority's directory", "a name"),
		RunE: func(c *cobra.Command, args []string) error {
			if err := checkValidity(m.Valid); err != nil {
				return err
			}
			m.Name = args[1]
			return issue(c.OutOrStdout(), args[0], m, force, asJSON)
		},
	}
	c.Flags().StringArrayVar(&m.Hosts, "host", nil, "a name or an address of the member, as "+
		"often as there are; without it the member's name")
	validity(c, &m.Valid, 365)
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	c.Flags().BoolVar(&force, "force", false, "replace a certificate that is there: the old one "+
		"stays valid until it expires")
	return c
}

func issue(w io.Writer, dir string, m authority.Member, force, asJSON bool) error {
	if err := authority.CheckName(m.Name); err != nil {
		return failure(err)
	}
	a, err := loadAuthority(dir)
	if err != nil {
		return err
	}
	pair, leaf, err := a.Issue(m)
	if err != nil {
		return failure(err)
	}
	cert, key := authority.Paths(dir, m.Name)
	before, noneBefore := authority.Serial(cert)
	if err := authority.Store(pair, cert, key, force); err != nil {
		return failure(err)
	}
	old, replaced := "", ""
	if noneBefore == nil {
		replaced = before.Text(16)
		old = fmt.Sprintf("the one that was there stays valid: to end that, sluice keys revoke "+
			"%s --serial %x\n", quoted(dir), before)
	}
	ca := filepath.Join(dir, authority.CertFile)
	hosts := append([]string(nil), leaf.DNSNames...)
	for _, ip := range leaf.IPAddresses {
		hosts = append(hosts, ip.String())
	}
	until := day(leaf.NotAfter)
	if leaf.NotAfter.Equal(a.Cert().NotAfter) {
		until += ", as the authority's own"
	}
	if asJSON {
		return printJSON(w, issueOutput{m.Name, hosts, leaf.SerialNumber.Text(16), replaced,
			leaf.NotAfter, cert, key, ca})
	}
	return tellf(w, `certificate of %q for %v, valid until %s, serial number %x
%scopy to the host of %s, then delete %s here:
  %s  its certificate
  %s  its key: for its owner alone
  %s  the authority's certificate
use: sluice agent --listen %s --cert %s --key %s --ca %s --region kv=64MiB
 or: sluice ls --peer HOST:PORT --cert %[12]s --key %[13]s --ca %[14]s
`, m.Name, hosts, until, leaf.SerialNumber, old, m.Name, key, cert, key, ca,
		quoted(listenAt(m.Hosts)), quoted(cert), quoted(key), quoted(ca))
}

// listenAt is where a member of these hosts may listen: at the first address, or at all.
func listenAt(hosts []string) string {
	for _, h := range hosts {
		if net.ParseIP(h) != nil {
			return net.JoinHostPort(h, "7000")
		}
	}
	return "0.0.0.0:7000"
}

// quoted is text as a shell takes it.
func quoted(text string) string {
	plain := func(r rune) bool {
		return strings.ContainsRune("/._-+:@%=,[]", r) || unicode.IsLetter(r) || unicode.IsDigit(r)
	}
	if strings.ContainsFunc(text, func(r rune) bool { return !plain(r) }) {
		return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
	}
	return text
}

func day(t time.Time) string { return t.UTC().Format(time.DateOnly) }

// tellf writes what a command has to say.
func tellf(w io.Writer, format string, args ...any) error {
	if _, err := fmt.Fprintf(w, format, args...); err != nil {
		return fmt.Errorf("write result: %w", err)
	}
	return nil
}

// words wants as many arguments as it names.
func words(what ...string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		switch {
		case len(args) < len(what):
			return usagef("%s is missing", what[len(args)])
		case len(args) > len(what):
			return usagef("unexpected argument %q", args[len(what)])
		}
		for i, arg := range args {
			if arg == "" {
				return usagef("%s is empty", what[i])
			}
		}
		return nil
	}
}
