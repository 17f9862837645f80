// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"math/big"
	"os"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/internal/authority"
)

func newKeysRevoke() *cobra.Command {
	var serial string
	var asJSON bool
	c := &cobra.Command{
		Use:   "revoke DIR [NAME]",
		Short: "Revoke the certificate of a member",
		Long: `Add a member's certificate to the list of those that the authority has revoked, and sign the
list. Each member that is to refuse it needs the list (--revoked), and follows the file: it
refuses new connections from the next handshake on, and those that stand go on until they end.
The certificate is that of NAME in the directory, or the one with --serial. Without both an
empty list is made, so that members can be started with one.`,
		Example: `  sluice keys revoke ca decode-0
  sluice keys revoke ca --serial 4f1c2a
  sluice agent --listen 10.0.0.2:7000 --cert a.pem --key a-key.pem --ca ca.pem --revoked ca-revoked.pem --region kv=1GiB`,
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case len(args) == 0:
				return usagef("the authority's directory is missing")
			case len(args) > 2:
				return usagef("unexpected argument %q", args[2])
			case len(args) == 2 && serial != "":
				return usagef("a name and --serial: want one of them")
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			a, err := loadAuthority(args[0])
			if err != nil {
				return err
			}
			number, err := revokedSerial(args, serial)
			if err != nil {
				return err
			}
			path, err := a.RevokeIn(args[0], number)
			if err != nil {
				return failure(err)
			}
			if asJSON {
				out := revokeOutput{List: path}
				if number != nil {
					out.Serial = number.Text(16)
				}
				return printJSON(c.OutOrStdout(), out)
			}
			what := "no certificate is added"
			if number != nil {
				what = fmt.Sprintf("serial number %x is revoked", number)
			}
			return tellf(c.OutOrStdout(), "%s\n  %s  the list: copy it to each member, whose "+
				"--revoked names it\n", what, path)
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	c.Flags().StringVar(&serial, "serial", "", "number of the certificate in hexadecimal digits, "+
		"as errors and keys issue print it")
	return c
}

// revokedSerial is the number that a command line names; nil: none.
func revokedSerial(args []string, text string) (*big.Int, error) {
	if text != "" {
		n, ok := new(big.Int).SetString(text, 16)
		if !ok || n.Sign() <= 0 || n.BitLen() > 160 { // RFC 5280: 20 bytes
			return nil, usagef("--serial %q: want hexadecimal digits", text)
		}
		return n, nil
	}
	if len(args) == 1 {
		return nil, nil
	}
	if err := authority.CheckName(args[1]); err != nil {
		return nil, failure(err)
	}
	cert, _ := authority.Paths(args[0], args[1])
	n, err := authority.Serial(cert)
	if errors.Is(err, os.ErrNotExist) {
		return nil, usagef("%s is not there: say the certificate's number with --serial", cert)
	}
	return n, failure(err)
}

// loadAuthority reads the authority of a directory.
func loadAuthority(dir string) (*authority.Authority, error) {
	a, err := authority.Load(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, usagef("no authority in %s: make one with sluice keys init %s (%v)", dir, dir,
			err)
	}
	if err != nil {
		return nil, fmt.Errorf("authority in %s: %w", dir, err)
	}
	return a, nil
}
