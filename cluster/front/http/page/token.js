// Keeps the token for as long as the tab is open, and shows it to the router.

export const keepToken = (token) => sessionStorage.setItem("token", token);

export function headers() {
  const token = sessionStorage.getItem("token");
  return token ? { Authorization: `Bearer ${token}` } : {};
}
